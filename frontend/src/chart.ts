/** The attention curve along the slices: truth, fitted normal, heads, key slices, and the slice that is shown. */

import type { Curve, Scan } from "./api"
import { draw, element, share } from "./words"

export interface Line {
  title: string
  curve: Curve
  /** Which of the two methods, and so its colour. */
  slot: "a" | "b"
}

const MARGIN = { left: 46, right: 14, top: 20, bottom: 38 }
const TRUTH = 9 // height of the bar of positive slices
const SVG = "http://www.w3.org/2000/svg"

export class Chart {
  readonly root: HTMLElement
  private readonly svg: SVGElement
  private readonly legend: HTMLElement
  private cursor: SVGElement | null = null
  private scan: Scan | null = null
  private lines: Line[] = []
  private heads = false
  private place = 0
  private width = 0
  private height = 0

  constructor(private readonly onPlace: (place: number) => void) {
    this.svg = document.createElementNS(SVG, "svg")
    this.svg.setAttribute("tabindex", "0")
    this.svg.setAttribute("role", "slider")
    this.svg.setAttribute("aria-label", "Slice, by its attention")
    this.svg.setAttribute("class", "chart")
    this.legend = element("div", { class: "legend" })
    this.root = element("div", { class: "curve" }, this.legend, element("div", { class: "plot" }))
    this.root.querySelector(".plot")!.append(this.svg)
    this.listen()
    new ResizeObserver(() => this.resize()).observe(this.svg.parentElement!)
  }

  show(scan: Scan, lines: Line[], heads: boolean): void {
    this.scan = scan
    this.lines = lines
    this.heads = heads
    this.redraw()
  }

  /** Moves the cursor. */
  move(place: number): void {
    this.place = place
    if (!this.scan || !this.cursor) return
    this.cursor.setAttribute("transform", `translate(${this.x(place)} 0)`)
    this.cursor.querySelector("text")!.textContent = String(place + 1)
    this.svg.setAttribute("aria-valuemin", "1")
    this.svg.setAttribute("aria-valuemax", String(this.scan.slices))
    this.svg.setAttribute("aria-valuenow", String(place + 1))
  }

  private listen(): void {
    const jump = (event: PointerEvent) => {
      if (!this.scan) return
      const along = (event.clientX - this.svg.getBoundingClientRect().left - MARGIN.left) / this.inner()
      const place = Math.floor(along * this.scan.slices)
      this.onPlace(Math.min(this.scan.slices - 1, Math.max(0, place)))
    }
    this.svg.addEventListener("pointerdown", (event) => {
      this.svg.setPointerCapture(event.pointerId)
      jump(event)
    })
    this.svg.addEventListener("pointermove", (event) => {
      if (this.svg.hasPointerCapture(event.pointerId)) jump(event)
    })
  }

  private resize(): void {
    const { clientWidth, clientHeight } = this.svg.parentElement!
    if (clientWidth === this.width && clientHeight === this.height) return
    this.width = clientWidth
    this.height = clientHeight
    this.redraw()
  }

  private inner(): number {
    return this.width - MARGIN.left - MARGIN.right
  }

  /** The middle of a slice's column. */
  private x(place: number): number {
    return MARGIN.left + (this.inner() * (place + 0.5)) / this.scan!.slices
  }

  private redraw(): void {
    this.svg.replaceChildren()
    this.legend.replaceChildren()
    if (!this.scan || this.width < 80 || this.height < 60) return
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`)
    const bottom = this.height - MARGIN.bottom
    // Two curves are each as high as their own peak: a narrow one would flatten the other.
    const relative = this.lines.length > 1
    const common = Math.max(...this.lines.map((line) => this.peak(line)), 1e-12)
    this.drawTruth(bottom)
    for (const line of this.lines) this.drawInterval(line, bottom)
    this.drawAxes(bottom, relative ? null : common)
    for (const line of this.lines) this.drawLine(line, bottom, relative ? this.peak(line) : common)
    this.drawLegend(relative)
    this.cursor = draw(this.svg, "g", { class: "cursor" })
    draw(this.cursor, "line", { y1: MARGIN.top - 2, y2: bottom + TRUTH + 3 })
    draw(this.cursor, "rect", { x: -17, y: 2, width: 34, height: 16, rx: 4 })
    draw(this.cursor, "text", { y: 14, "text-anchor": "middle" })
    this.move(this.place)
  }

  private peak({ curve }: Line): number {
    const heads = this.heads ? curve.heads.flat() : []
    return 1.06 * [...curve.attention, ...curve.normal, ...heads].reduce((a, b) => Math.max(a, b), 0)
  }

  /** A bar under the axis, and a tint behind the curve. */
  private drawTruth(bottom: number): void {
    const step = this.inner() / this.scan!.slices
    draw(this.svg, "rect", {
      class: "truth-track",
      x: MARGIN.left,
      y: bottom + 2,
      width: this.inner(),
      height: TRUTH,
    })
    for (const [first, last] of runs(this.scan!.truth ?? [])) {
      const box = { x: MARGIN.left + first * step, width: (last - first + 1) * step }
      draw(this.svg, "rect", { class: "truth-tint", ...box, y: MARGIN.top, height: bottom - MARGIN.top })
      draw(this.svg, "rect", { class: "truth", ...box, y: bottom + 2, height: TRUTH })
    }
  }

  /** The slices between which the finding is said to lie. */
  private drawInterval({ curve: { interval }, slot }: Line, bottom: number): void {
    if (!interval) return
    const step = this.inner() / this.scan!.slices
    const width = (interval.last_position - interval.first_position + 1) * step
    const box = { x: MARGIN.left + interval.first_position * step, width, y: MARGIN.top, height: bottom - MARGIN.top }
    const shade = draw(this.svg, "rect", { class: `interval ${slot}`, ...box })
    draw(shade, "title", {}, intervalText(interval))
  }

  private drawAxes(bottom: number, top: number | null): void {
    const left = MARGIN.left
    draw(this.svg, "line", { class: "axis", x1: left, x2: this.width - MARGIN.right, y1: bottom, y2: bottom })
    for (const tick of top === null ? [0, 1] : nice(top)) {
      const y = bottom - ((bottom - MARGIN.top) * tick) / (top ?? 1.06)
      draw(this.svg, "line", { class: "grid", x1: left, x2: this.width - MARGIN.right, y1: y, y2: y })
      const label = top === null ? (tick ? "peak" : "0") : share(tick)
      draw(this.svg, "text", { class: "tick", x: left - 6, y: y + 3.5, "text-anchor": "end" }, label)
    }
    const step = slicesBetweenTicks(this.scan!.slices, this.inner())
    for (let number = step < 5 ? step : 0; number <= this.scan!.slices; number += step) {
      const shown = Math.max(1, number) // 1, 5, 10, ... or 2, 4, 6, ...
      const attributes = { class: "tick", x: this.x(shown - 1), y: bottom + TRUTH + 15, "text-anchor": "middle" }
      draw(this.svg, "text", attributes, String(shown))
    }
    const end = { class: "tick", x: this.width - MARGIN.right, y: this.height - 3, "text-anchor": "end" }
    draw(this.svg, "text", end, "slice")
  }

  private drawLine({ curve, slot }: Line, bottom: number, top: number): void {
    const y = (value: number) => bottom - ((bottom - MARGIN.top) * value) / top
    const path = (values: number[]) =>
      values.map((value, place) => `${place ? "L" : "M"}${this.x(place).toFixed(1)} ${y(value).toFixed(1)}`).join("")
    const group = draw(this.svg, "g", { class: `line ${slot}` })
    if (this.heads) for (const head of curve.heads) draw(group, "path", { class: "head", d: path(head) })
    const area = `${path(curve.attention)}L${this.x(curve.attention.length - 1)} ${bottom}L${this.x(0)} ${bottom}Z`
    if (this.lines.length === 1) draw(group, "path", { class: "area", d: area })
    draw(group, "path", { class: "normal", d: path(curve.normal) })
    draw(group, "path", { class: "attention", d: path(curve.attention) })
    for (const place of curve.key_positions)
      draw(group, "circle", { class: "key", cx: this.x(place), cy: y(curve.attention[place]!), r: 3.6 })
  }

  private drawLegend(relative: boolean): void {
    for (const { title, slot } of this.lines)
      this.legend.append(
        element("span", { class: `mark method ${slot}`, title }, element("i", { class: "stroke" }), element("b", {}, title)),
      )
    const marks: [string, string][] = [["dashes", "fitted normal"]]
    if (this.lines.some(({ curve }) => curve.key_positions.length)) marks.push(["dot", "key slices"])
    const interval = this.lines.find(({ curve }) => curve.interval)?.curve.interval
    if (interval) marks.push(["shade", `interval ${interval.first_position + 1}–${interval.last_position + 1}`])
    if (this.heads && this.lines.some(({ curve }) => curve.heads.length)) marks.push(["thin", "heads"])
    marks.push(this.scan!.truth ? ["block", "labelled positive"] : ["block none", "no slice labels"])
    for (const [kind, title] of marks) {
      const hint = kind === "shade" ? intervalText(interval!) : title
      this.legend.append(element("span", { class: "mark", title: hint }, element("i", { class: kind }), title))
    }
    if (relative) this.legend.append(element("span", { class: "mark note" }, "each curve to its own peak"))
  }
}

function intervalText({ first_position: first, last_position: last, meaning }: NonNullable<Curve["interval"]>): string {
  return `The interval, slices ${first + 1} to ${last + 1}, ${meaning}.`
}

/** First and last place of every run of positive slices. */
export function runs(labels: number[]): [number, number][] {
  const found: [number, number][] = []
  labels.forEach((label, place) => {
    if (!label) return
    const last = found[found.length - 1]
    if (last && last[1] === place - 1) last[1] = place
    else found.push([place, place])
  })
  return found
}

/** Two to five ticks at 1, 2 or 5 times a power of ten. */
function nice(top: number): number[] {
  const power = 10 ** Math.floor(Math.log10(top))
  const step = [0.2, 0.5, 1, 2, 5].map((factor) => factor * power).find((one) => top / one < 4.5) ?? power
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, place) => place * step)
}

function slicesBetweenTicks(slices: number, width: number): number {
  return [1, 2, 5, 10, 20, 50, 100, 200, 500].find((step) => (width / slices) * step > 34) ?? 1000
}
