/** A slice with its curve beneath. */

import { Chart, type Line } from "./chart"
import { ServerError, type Scan, type Window } from "./api"
import { Display, rangeOf, type Point, type Range } from "./display"
import { listenToGestures, listenToWheel, type Tool } from "./gestures"
import { Ruler } from "./ruler"
import type { Slices } from "./slices"
import { call, described, element, keyNumber, millimetres, share } from "./words"

/** What the panel shows; nothing is drawn twice for the same. */
export interface View {
  scan: Scan
  lines: Line[]
  place: number
  window: Window
  heads: boolean
  tool: Tool
}

export interface Choices {
  onPlace(place: number): void
  onStep(step: number): void
  /** The reader drags the window from `start`, by pixels right and down. */
  onWindow(start: Range, x: number, y: number): void
}

/** Milliseconds after which a slice that is still on its way is told of. */
const PATIENCE = 200

export class Panel {
  readonly root: HTMLElement
  private readonly chart: Chart
  private readonly stage: HTMLElement
  private readonly picture: HTMLElement
  private readonly overlay: HTMLElement
  private readonly message: HTMLElement
  private readonly display: Display
  private readonly ruler = new Ruler()
  private view: View | null = null
  private drawn = ""
  private drawing = false
  private direction = 1

  constructor(
    private readonly slices: Slices,
    private readonly choices: Choices,
  ) {
    this.chart = new Chart((place) => choices.onPlace(place))
    this.picture = element("div", { class: "picture" })
    this.display = new Display(this.picture, () => this.afterPaint())
    this.overlay = element("div", { class: "overlay" })
    this.message = element("div", { class: "message", role: "status" })
    const label = { class: "stage", tabindex: "0", "aria-label": "Slice" }
    this.stage = element("div", label, this.picture, this.overlay, this.message)
    this.picture.after(this.ruler.root)
    this.root = element("section", { class: "panel" }, this.stage, this.chart.root)
    this.listen()
  }

  /** Whether the slice on the screen is the one that is wanted. */
  get isDrawn(): boolean {
    return !this.view || keyOf(this.view) === this.drawn
  }

  /** Zooms around the middle; without a factor, shows all. */
  zoom(factor?: number): void {
    if (factor) this.display.zoomBy(factor, { x: this.stage.clientWidth / 2, y: this.stage.clientHeight / 2 })
    else this.display.reset()
  }

  removeRuler(): void {
    if (!this.view) return
    this.ruler.remove(sliceOf(this.view))
    this.afterPaint()
  }

  private listen(): void {
    let start: Range = { low: 0, high: 1 }
    const onStep = (step: number) => this.choices.onStep(step)
    listenToGestures(this.stage, {
      tool: () => this.view?.tool ?? "window",
      onStep,
      onWindow: (x, y, isFirst) => {
        if (isFirst) start = this.display.range
        if (this.view?.scan.image) this.choices.onWindow(start, x, y)
      },
      onMove: (x, y) => this.display.moveBy(x, y),
      onZoom: (factor, at) => this.display.zoomBy(factor, at),
      onMeasure: (at, isFirst) => this.measure(at, isFirst),
    })
    listenToWheel(this.chart.root, onStep)
  }

  private measure(at: Point, isFirst: boolean): void {
    if (!this.view?.scan.image || !this.isDrawn) return
    const place = this.display.toImage(at)
    if (isFirst) this.ruler.begin(sliceOf(this.view), place)
    else this.ruler.move(sliceOf(this.view), place)
    this.afterPaint()
  }

  private afterPaint(): void {
    const view = this.view
    if (!view?.scan.image) return
    this.ruler.show(sliceOf(view), view.scan.image, this.display)
    const zoom = this.overlay.querySelector(".zoom")
    if (zoom) zoom.textContent = this.display.zoom > 1 ? `zoom ${this.display.zoom.toFixed(1)} ×` : ""
  }

  show(view: View): void {
    const before = this.view
    this.view = view
    this.stage.dataset["tool"] = view.tool
    if (before?.scan !== view.scan) this.display.reset()
    this.direction = before && view.place < before.place ? -1 : 1
    if (before?.scan !== view.scan || before.lines !== view.lines || before.heads !== view.heads)
      this.chart.show(view.scan, view.lines, view.heads)
    this.chart.move(view.place)
    this.write()
    void this.draw()
  }

  /** Draws until what is drawn is what is wanted: the reader may scroll faster than slices come. */
  private async draw(): Promise<void> {
    if (this.drawing) return
    this.drawing = true
    try {
      while (this.view && keyOf(this.view) !== this.drawn) {
        const view = this.view
        await this.drawOne(view)
        this.drawn = keyOf(view)
      }
    } finally {
      this.drawing = false
    }
  }

  private async drawOne(view: View): Promise<void> {
    const { scan, place, window } = view
    if (!scan.image) {
      this.stage.classList.add("empty")
      this.say(scan.note ?? "There are no images of this scan.")
      return this.mark(view)
    }
    this.stage.classList.remove("empty")
    const late = setTimeout(() => this.say("Reading the slice …"), PATIENCE)
    try {
      const pixels = this.slices.peek(scan.number, place) ?? (await this.slices.get(scan.number, place))
      this.slices.prefetch(scan.number, place, scan.slices, this.direction)
      if (this.view !== view && keyOf(this.view!) !== keyOf(view)) return // somewhere else already
      this.display.show(pixels, scan.image, rangeOf(window, pixels))
      this.picture.classList.remove("stale")
      this.say("")
      this.mark(view)
    } catch (error) {
      if (this.view !== view && keyOf(this.view!) !== keyOf(view)) return
      this.picture.classList.add("stale") // the last slice must not pass for this one
      this.say(error instanceof ServerError ? error.message : `The slice cannot be shown (${error}).`, true)
      this.mark(view)
    } finally {
      clearTimeout(late)
    }
  }

  /** Tells what is on the screen. */
  private mark(view: View): void {
    this.root.dataset["drawn"] = keyOf(view)
  }

  private say(text: string, isError = false): void {
    this.message.textContent = text
    this.message.classList.toggle("error", isError)
    this.message.hidden = !text
  }

  private write(): void {
    const { scan, lines, place, window } = this.view!
    const position = scan.positions_mm?.[place]
    const instance = scan.instance_numbers?.[place]
    const line = (kind: string, text: string | null | undefined) => (text ? element("span", { class: kind }, text) : null)
    const about = lines.flatMap(({ curve, slot }) => {
      const key = keyNumber(curve, place)
      const own = `attention ${share(curve.attention[place]!)}${key ? `, ${key}` : ""}`
      return [line(`call ${slot}`, call(curve)), line(`attention ${slot}`, own)]
    })
    const letters = Object.entries(scan.image?.letters ?? {})
    this.overlay.replaceChildren(
      element(
        "span",
        { class: "place" },
        element("b", {}, `Slice ${place + 1}`),
        ` / ${scan.slices}`,
        line("instance", instance === undefined || instance === null ? null : `InstanceNumber ${instance}`),
        line("position", position === undefined ? null : millimetres(position)),
        line("series", scan.series),
        line("positive", scan.truth?.[place] ? "labelled positive" : null),
      ),
      element("span", { class: "window" }, described(window), element("span", { class: "zoom" })),
      element("span", { class: "rank" }, ...about),
      ...letters.map(([edge, letter]) => element("span", { class: `edge ${edge}` }, letter)),
    )
    this.afterPaint()
  }
}

function keyOf(view: View): string {
  return `${sliceOf(view)}/${view.window.low}:${view.window.high}`
}

function sliceOf({ scan, place }: View): string {
  return `${scan.number}/${place}`
}
