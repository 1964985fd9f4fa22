/** How a slice comes to the screen: grey values on a canvas, which can be zoomed and moved. */

import type { Image, Window } from "./api"

export interface Range {
  low: number
  high: number
}

/** A place: columns and rows of the image, or pixels of the stage. */
export interface Point {
  x: number
  y: number
}

const LOW = 0.01
const HIGH = 0.99
const VALUES = 2 ** 16
const MOST_ZOOM = 20

/** Not on a graphics card, which may be emulated: one slice is little work. */
const IN_MEMORY: CanvasRenderingContext2DSettings = { willReadFrequently: true }

const own = new WeakMap<Int16Array, Range>()

/** The range of a window; the slice's own is from the 1st to the 99th percentile of its pixels above the lowest. */
export function rangeOf(window: Window, pixels: Int16Array): Range {
  if (window.low !== null && window.high !== null) return { low: window.low, high: window.high }
  const known = own.get(pixels) ?? percentiles(pixels)
  own.set(pixels, known)
  return known
}

function percentiles(pixels: Int16Array): Range {
  const sorted = Int16Array.from(pixels).sort()
  const above = sorted.subarray(sorted.findIndex((value) => value > sorted[0]!))
  const at = (share: number) => above[Math.round(share * (above.length - 1))]!
  const low = at(LOW)
  return { low, high: Math.max(at(HIGH), low + 1) }
}

/** The grey of every value of 16 bits. */
function greys({ low, high }: Range): Uint32Array {
  const table = new Uint32Array(VALUES)
  for (let place = 0; place < VALUES; place++) {
    const level = Math.round(Math.min(255, Math.max(0, ((place - VALUES / 2 - low) * 255) / (high - low))))
    table[place] = 0xff000000 | (level << 16) | (level << 8) | level
  }
  return table
}

export class Display {
  /** Of the picture that fills the stage. */
  zoom = 1
  range: Range = { low: 0, high: 1 }
  private readonly canvas = document.createElement("canvas")
  private readonly source = new OffscreenCanvas(1, 1)
  private image: Image | null = null
  private moved: Point = { x: 0, y: 0 }

  constructor(
    private readonly parent: HTMLElement,
    private readonly onPaint: () => void,
  ) {
    parent.replaceChildren(this.canvas)
    new ResizeObserver(() => this.paint()).observe(parent)
  }

  show(pixels: Int16Array, image: Image, range: Range): void {
    const grey = new ImageData(image.columns, image.rows)
    const words = new Uint32Array(grey.data.buffer)
    const table = greys(range)
    for (let place = 0; place < words.length; place++) words[place] = table[pixels[place]! + VALUES / 2]!
    this.source.width = image.columns
    this.source.height = image.rows
    this.source.getContext("2d", IN_MEMORY)!.putImageData(grey, 0, 0)
    this.image = image
    this.range = range
    this.paint()
  }

  /** Zooms so that what lies at `at` stays there. */
  zoomBy(factor: number, at: Point): void {
    const zoom = Math.min(MOST_ZOOM, Math.max(1, this.zoom * factor))
    const middle = { x: this.parent.clientWidth / 2, y: this.parent.clientHeight / 2 }
    const ratio = zoom / this.zoom
    this.moved.x = (at.x - middle.x) * (1 - ratio) + this.moved.x * ratio
    this.moved.y = (at.y - middle.y) * (1 - ratio) + this.moved.y * ratio
    this.zoom = zoom
    this.paint()
  }

  moveBy(x: number, y: number): void {
    this.moved = { x: this.moved.x + x, y: this.moved.y + y }
    this.paint()
  }

  reset(): void {
    this.zoom = 1
    this.moved = { x: 0, y: 0 }
    this.paint()
  }

  toScreen({ x, y }: Point): Point {
    const { left, top, width, height } = this.frame()
    return { x: left + (x / this.image!.columns) * width, y: top + (y / this.image!.rows) * height }
  }

  toImage({ x, y }: Point): Point {
    const { left, top, width, height } = this.frame()
    return { x: ((x - left) / width) * this.image!.columns, y: ((y - top) / height) * this.image!.rows }
  }

  /** Where the picture lies in the stage; pixels that are not square are drawn as they are in mm. */
  private frame(): { left: number; top: number; width: number; height: number } {
    const { clientWidth, clientHeight } = this.parent
    const { columns, rows, spacing } = this.image!
    const [down, across] = spacing ?? [1, 1]
    const scale = this.zoom * Math.min(clientWidth / (columns * across), clientHeight / (rows * down))
    const [width, height] = [columns * across * scale, rows * down * scale]
    const left = (clientWidth - width) / 2 + this.moved.x
    return { left, top: (clientHeight - height) / 2 + this.moved.y, width, height }
  }

  private paint(): void {
    if (!this.image) return
    const ratio = devicePixelRatio
    this.canvas.width = this.parent.clientWidth * ratio // clears it, too
    this.canvas.height = this.parent.clientHeight * ratio
    const { left, top, width, height } = this.frame()
    this.canvas.getContext("2d", IN_MEMORY)!.drawImage(this.source, left * ratio, top * ratio, width * ratio, height * ratio)
    this.onPaint()
  }
}
