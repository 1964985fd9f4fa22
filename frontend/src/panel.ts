/** A slice with its curve beneath. */

import { Chart, type Line } from "./chart"
import { ServerError, type Scan, type Window } from "./api"
import { openDisplay, rangeOf, type Display } from "./display"
import type { Slices } from "./slices"
import { described, element, millimetres, share } from "./words"

/** What the panel shows; nothing is drawn twice for the same. */
export interface View {
  scan: Scan
  lines: Line[]
  place: number
  window: Window
  heads: boolean
}

/** Pixels of scrolling that are one slice at least. */
const PIXELS = 50

/** Milliseconds after which a slice that is still on its way is told of. */
const PATIENCE = 200

export class Panel {
  readonly root: HTMLElement
  private readonly chart: Chart
  private readonly stage: HTMLElement
  private readonly picture: HTMLElement
  private readonly overlay: HTMLElement
  private readonly message: HTMLElement
  private display: Promise<Display> | null = null
  private view: View | null = null
  private drawn = ""
  private drawing = false
  private direction = 1

  constructor(
    private readonly slices: Slices,
    onPlace: (place: number) => void,
    onStep: (step: number) => void,
  ) {
    this.chart = new Chart(onPlace)
    this.picture = element("div", { class: "picture" })
    this.overlay = element("div", { class: "overlay" })
    this.message = element("div", { class: "message", role: "status" })
    this.stage = element("div", { class: "stage", tabindex: "0", "aria-label": "Slice" }, this.picture, this.overlay, this.message)
    this.root = element("section", { class: "panel" }, this.stage, this.chart.root)
    listenToWheel(this.stage, onStep)
    listenToWheel(this.chart.root, onStep)
  }

  show(view: View): void {
    const before = this.view
    this.view = view
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
      this.display ??= openDisplay(this.picture)
      const display = await this.display
      await display.show(pixels, scan.image, rangeOf(window, pixels))
      this.picture.classList.remove("stale")
      this.say("")
      this.mark(view, display.kind)
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
  private mark(view: View, kind = ""): void {
    this.root.dataset["drawn"] = keyOf(view)
    this.root.dataset["display"] = kind
    this.overlay.querySelector(".display")?.remove()
    if (kind === "canvas") this.overlay.append(element("span", { class: "display" }, "no WebGL 2: plain drawing"))
  }

  private say(text: string, isError = false): void {
    this.message.textContent = text
    this.message.classList.toggle("error", isError)
    this.message.hidden = !text
  }

  private write(): void {
    const { scan, lines, place, window } = this.view!
    const position = scan.positions?.[place]
    const about = lines.map(({ curve, slot }) => {
      const own = curve.attention[place]!
      const rank = 1 + curve.attention.filter((other) => other > own).length
      const among = curve.key_slices.length ? `rank ${rank} of ${scan.slices}` : "the same on all slices"
      return element("span", { class: `attention ${slot}` }, `attention ${share(own)}, ${among}`)
    })
    const letters = scan.image?.letters
    const display = this.overlay.querySelector(".display")
    this.overlay.replaceChildren(
      element(
        "span",
        { class: "place" },
        element("b", {}, `Slice ${place + 1}`),
        ` / ${scan.slices}`,
        position === undefined ? null : element("span", { class: "position" }, millimetres(position)),
        scan.truth?.[place] ? element("span", { class: "positive" }, "labelled positive") : null,
      ),
      element("span", { class: "window" }, described(window)),
      element("span", { class: "rank" }, ...about),
      ...(letters ? Object.entries(letters).map(([edge, letter]) => element("span", { class: `edge ${edge}` }, letter)) : []),
    )
    if (display) this.overlay.append(display)
  }
}

function keyOf({ scan, place, window }: View): string {
  return `${scan.number}/${place}/${window.low}:${window.high}`
}

/** One slice for each notch of a mouse wheel; a touch pad sends many small steps, which add up. */
function listenToWheel(target: HTMLElement, onStep: (step: number) => void): void {
  let rest = 0
  target.addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey) return // the browser's zoom
      event.preventDefault()
      const notches = event.deltaMode === WheelEvent.DOM_DELTA_PIXEL ? event.deltaY / PIXELS : event.deltaY
      rest += Math.min(1, Math.max(-1, notches))
      const step = Math.trunc(rest)
      if (step) onStep(step)
      rest -= step
    },
    { passive: false },
  )
}
