/** Distances that the reader measures: one on each slice, kept until the page is closed. */

import type { Image } from "./api"
import type { Display, Point } from "./display"
import { draw } from "./words"

interface Segment {
  from: Point
  to: Point
}

/** Pixels of the screen that a finger or mouse must move before it is a distance. */
const LEAST = 4

export class Ruler {
  readonly root = document.createElementNS("http://www.w3.org/2000/svg", "svg")
  private readonly segments = new Map<string, Segment>()

  constructor() {
    this.root.setAttribute("class", "ruler")
  }

  /** Begins a distance on a slice, in place of the last one. */
  begin(slice: string, from: Point): void {
    this.segments.set(slice, { from, to: from })
  }

  move(slice: string, to: Point): void {
    const segment = this.segments.get(slice)
    if (segment) segment.to = to
  }

  remove(slice: string): void {
    this.segments.delete(slice)
  }

  show(slice: string, image: Image, display: Display): void {
    this.root.replaceChildren()
    const segment = this.segments.get(slice)
    if (!segment) return
    const [a, b] = [display.toScreen(segment.from), display.toScreen(segment.to)]
    if (Math.hypot(b.x - a.x, b.y - a.y) < LEAST) return
    draw(this.root, "line", { x1: a.x, y1: a.y, x2: b.x, y2: b.y })
    for (const { x, y } of [a, b]) draw(this.root, "circle", { cx: x, cy: y, r: 3 })
    const right = b.x >= a.x
    const text = { x: b.x + (right ? 9 : -9), y: b.y + 4, "text-anchor": right ? "start" : "end" }
    draw(this.root, "text", text, distance(segment, image))
  }
}

/** In mm where the spacing of pixels is known. */
function distance({ from, to }: Segment, { spacing }: Image): string {
  const [down, across] = spacing ?? [1, 1]
  const length = Math.hypot((to.x - from.x) * across, (to.y - from.y) * down)
  return `${length.toFixed(1)} ${spacing ? "mm" : "pixels"}`
}
