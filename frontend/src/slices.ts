/** Slices that were fetched or will be needed next. */

import { readSlice } from "./api"

/** Bytes of slices that the page keeps: about 500 of 512 x 512 pixels. */
const LIMIT = 256 * 2 ** 20

/** Slices that are fetched ahead on the side to which the reader scrolls, and on the other side. */
const AHEAD = 16
const BEHIND = 4

/** Requests at a time; a browser makes 6, and the slice to show must not wait for the others. */
const PARALLEL = 4

export class Slices {
  private held = new Map<string, Int16Array>()
  private coming = new Map<string, Promise<Int16Array>>()
  private bytes = 0
  private wanted: [number, number][] = []
  private running = 0
  private abort = new AbortController()
  private scan = -1

  /** A slice that is at hand. */
  peek(scan: number, place: number): Int16Array | undefined {
    const key = `${scan}/${place}`
    const slice = this.held.get(key)
    if (slice) {
      this.held.delete(key) // to the end: what was used last
      this.held.set(key, slice)
    }
    return slice
  }

  async get(scan: number, place: number): Promise<Int16Array> {
    if (scan !== this.scan) {
      this.abort.abort()
      this.abort = new AbortController()
      this.wanted = []
      this.scan = scan
    }
    return this.peek(scan, place) ?? this.fetch(scan, place)
  }

  /** Fetches what will be asked for next. */
  prefetch(scan: number, place: number, count: number, direction: number): void {
    const [up, down] = direction < 0 ? [BEHIND, AHEAD] : [AHEAD, BEHIND]
    const places = []
    for (let step = 1; step <= AHEAD; step++) {
      if (step <= up) places.push(place + step)
      if (step <= down) places.push(place - step)
    }
    this.wanted = places.filter((one) => one >= 0 && one < count).map((one) => [scan, one])
    while (this.running < PARALLEL && this.wanted.length) void this.work()
  }

  private async work(): Promise<void> {
    this.running++
    try {
      for (let next = this.wanted.shift(); next; next = this.wanted.shift()) {
        const [scan, place] = next
        if (scan === this.scan && !this.held.has(`${scan}/${place}`)) await this.fetch(scan, place).catch(() => undefined)
      }
    } finally {
      this.running--
    }
  }

  private fetch(scan: number, place: number): Promise<Int16Array> {
    const key = `${scan}/${place}`
    let promise = this.coming.get(key)
    if (!promise) {
      promise = readSlice(scan, place, this.abort.signal)
        .then((slice) => this.keep(key, slice))
        .finally(() => this.coming.delete(key))
      this.coming.set(key, promise)
    }
    return promise
  }

  private keep(key: string, slice: Int16Array): Int16Array {
    this.held.set(key, slice)
    this.bytes += slice.byteLength
    for (const [oldest, old] of this.held) {
      if (this.bytes <= LIMIT || oldest === key) break
      this.held.delete(oldest)
      this.bytes -= old.byteLength
    }
    return slice
  }
}
