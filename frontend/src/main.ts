/** The page: what is chosen, and everything that follows from it. */

import { readGallery, readPage, readScan, readScans, ServerError, type Gallery, type Listed, type Modality, type Scan, type Window } from "./api"
import type { Line } from "./chart"
import { Cine } from "./cine"
import type { Range } from "./display"
import type { Tool } from "./gestures"
import { ScanList } from "./list"
import { Panel } from "./panel"
import { Slices } from "./slices"
import { keepToken, takeToken } from "./token"
import { element } from "./words"

const PAGE = 10 // slices that PageUp and PageDown go over
const ZOOM = 1.25 // of a key
const STEP = 250 // pixels of dragging that double a window's width

const find = <T extends HTMLElement>(selector: string): T => document.querySelector<T>(selector)!

class Page {
  private gallery!: Gallery
  private scans: Listed[] = []
  private scan: Scan | null = null
  private split = 0
  /** Names of the methods; the second is empty where none is compared. */
  private methods: [string, string] = ["", ""]
  private beside = false
  private linked = true
  private heads = false
  private tool: Tool = "window"
  /** A preset of the modality, or the reader's own. */
  private window!: Window
  private places: [number, number] = [0, 0]
  private active = 0
  private lines: Line[][] = []
  private opened = 0
  private readonly slices = new Slices()
  private readonly panels: Panel[]
  private readonly list: ScanList
  private readonly cine: Cine

  constructor() {
    this.list = new ScanList(find("#scans"), (scan) => void this.open(scan))
    this.panels = [0, 1].map(
      (number) =>
        new Panel(this.slices, {
          onPlace: (place) => this.choosePlace(place, number),
          onStep: (step) => this.choosePlace(this.places[number]! + step, number),
          onWindow: (start, x, y) => this.dragWindow(start, x, y),
        }),
    )
    const perSecond = () => Number(find<HTMLSelectElement>("#speed").value)
    this.cine = new Cine(() => this.advance(), perSecond, (plays) => this.showCine(plays))
    find("#panels").append(...this.panels.map((panel) => panel.root))
    this.panels.forEach((panel, number) => panel.root.addEventListener("pointerdown", () => (this.active = number)))
    this.listen()
  }

  async start(): Promise<void> {
    this.gallery = await readGallery()
    document.title = `${this.gallery.title} – nguide view`
    find("#title").textContent = this.gallery.title
    find("#version").textContent = `nguide ${this.gallery.version}`
    this.makeControls()
    this.showMissing()
    this.list.showNotPredicted(this.gallery.not_predicted)
    const asked = new URLSearchParams(location.hash.slice(1))
    const split = this.gallery.splits.findIndex(({ name }) => name === asked.get("split"))
    await this.openSplit(Math.max(0, split), asked)
    if (this.gallery.page) await this.makePage(!asked.has("scan"))
  }

  /** The report or the index: a document without scripts, whose scans lead to the viewer. */
  private async makePage(isFirst: boolean): Promise<void> {
    const frame = find<HTMLIFrameElement>("#page")
    frame.title = this.gallery.page
    frame.addEventListener("load", () => {
      const inside = frame.contentDocument!
      for (const one of inside.querySelectorAll<HTMLElement>(".hint")) one.hidden = true
      for (const link of inside.querySelectorAll<HTMLAnchorElement>("a[data-scan]")) {
        const scan = this.scans.find(({ id }) => id === link.dataset["scan"])
        if (!scan) continue
        link.href = "#"
        link.addEventListener("click", (event) => {
          event.preventDefault()
          void this.open(scan.number, Number(link.dataset["slice"] ?? NaN) - 1)
        })
      }
    })
    frame.src = URL.createObjectURL(await readPage())
    find("#page-button").textContent = this.gallery.page
    find("#page-button").hidden = false
    this.showPage(isFirst)
  }

  private showPage(isShown: boolean): void {
    find("#page").hidden = !isShown
    find("main").inert = isShown
    press("#page-button", isShown)
    document.body.classList.remove("list")
    if (isShown) history.replaceState(null, "", location.pathname)
    else if (this.scan) this.remember()
  }

  // ------------------------------------------------------------------------------------------------
  // Choosing
  // ------------------------------------------------------------------------------------------------

  private async openSplit(split: number, asked: URLSearchParams): Promise<void> {
    this.split = split
    this.scans = await readScans(split)
    const names = this.gallery.splits[split]!.methods.map(({ name }) => name)
    const pick = (name: string | null) => (name && names.includes(name) ? name : "")
    this.methods = [pick(asked.get("a")) || pick("ng") || names[0]!, pick(asked.get("b"))]
    find<HTMLSelectElement>("#split").value = String(split)
    this.fillMethods()
    this.list.show(this.scans, this.gallery.splits[split]!.methods)
    this.list.choose(this.columns())
    const number = Number(asked.get("scan") ?? NaN)
    const known = this.scans.some((scan) => scan.number === number)
    const first = known ? number : this.list.neighbour(0)
    if (first !== null) await this.open(first, known ? Number(asked.get("slice") ?? NaN) - 1 : NaN)
  }

  private async open(number: number, place = NaN): Promise<void> {
    const turn = ++this.opened
    this.cine.stop()
    this.showPage(false)
    this.list.select(number)
    try {
      const scan = await readScan(this.split, number)
      if (turn !== this.opened) return // another one was chosen meanwhile
      if (this.scan?.modality !== scan.modality) this.fillWindows(scan.modality)
      this.scan = scan
      this.chooseLines()
      const start = Number.isInteger(place) ? place : this.peak(0)
      this.places = [this.clamp(start), this.clamp(this.linked ? start : this.peak(1))]
      this.say("")
    } catch (error) {
      this.say(error instanceof Error ? error.message : String(error))
    }
    this.redraw()
  }

  private choose(method: 0 | 1, name: string): void {
    this.methods[method] = name
    this.list.choose(this.columns())
    this.chooseLines()
    this.redraw()
  }

  /** The reader goes somewhere, so the film ends. */
  private choosePlace(place: number, panel = this.active): void {
    this.cine.stop()
    this.go(place, panel)
  }

  /** The next slice of the film, once the last one is on the screen. */
  private advance(): void {
    if (this.scan && this.panels[this.active]!.isDrawn) this.go((this.places[this.active]! + 1) % this.scan.slices)
  }

  private go(place: number, panel = this.active): void {
    if (!this.scan) return
    this.active = panel
    if (this.linked || !this.isBeside()) this.places = [this.clamp(place), this.clamp(place)]
    else this.places[panel] = this.clamp(place)
    this.redraw()
  }

  private clamp(place: number): number {
    return Math.min((this.scan?.slices ?? 1) - 1, Math.max(0, place))
  }

  /** Where a method looks first: the middle, where it looks nowhere. */
  private peak(method: number): number {
    const curve = this.scan?.methods[this.methods[method]!] ?? this.scan?.methods[this.methods[0]]
    return curve?.key_positions[0] ?? Math.floor((this.scan?.slices ?? 0) / 2)
  }

  private nextKeySlice(): void {
    const keys = this.scan?.methods[this.methods[this.isBeside() ? this.active : 0]!]?.key_positions ?? []
    const at = keys.indexOf(this.places[this.active]!)
    if (keys.length) this.choosePlace(keys[(at + 1) % keys.length]!)
  }

  private columns(): number[] {
    const names = this.gallery.splits[this.split]!.methods.map(({ name }) => name)
    return this.methods.filter(Boolean).map((name) => names.indexOf(name))
  }

  private isBeside(): boolean {
    return this.beside && this.methods[1] !== ""
  }

  /** New arrays only where the curves change, so that nothing else draws them anew. */
  private chooseLines(): void {
    const line = (method: 0 | 1): Line[] => {
      const name = this.methods[method]
      const curve = this.scan?.methods[name]
      const title = this.gallery.splits[this.split]!.methods.find((one) => one.name === name)?.title
      return curve && title ? [{ title, curve, slot: method ? "b" : "a" }] : []
    }
    this.lines = this.isBeside() ? [line(0), line(1)] : [[...line(0), ...line(1)]]
  }

  // ------------------------------------------------------------------------------------------------
  // Showing
  // ------------------------------------------------------------------------------------------------

  private redraw(): void {
    const beside = this.isBeside()
    find("#panels").classList.toggle("beside", beside)
    this.panels[1]!.root.hidden = !beside
    const several = this.methods[1] !== ""
    for (const selector of ["#over", "#beside"]) find<HTMLButtonElement>(selector).disabled = !several
    press("#over", several && !this.beside)
    press("#beside", beside)
    press("#linked", beside && this.linked)
    find<HTMLButtonElement>("#linked").disabled = !beside
    press("#heads", this.heads)
    const scan = this.scan
    if (!scan) return
    const hasHeads = this.lines.flat().some(({ curve }) => curve.heads.length)
    const heads = find<HTMLButtonElement>("#heads")
    heads.hidden = !hasHeads
    for (const button of document.querySelectorAll<HTMLButtonElement>("#windows button"))
      button.setAttribute("aria-pressed", String(button.dataset["window"] === this.window.name))
    for (const button of document.querySelectorAll<HTMLButtonElement>("#tools button"))
      button.setAttribute("aria-pressed", String(button.dataset["tool"] === this.tool))
    this.lines.forEach((lines, number) =>
      this.panels[number]!.show({
        scan,
        lines,
        place: this.places[number]!,
        window: this.window,
        heads: this.heads,
        tool: this.tool,
      }),
    )
    const without = this.methods.filter((name) => name && !scan.methods[name])
    find("#absent").textContent = without.length ? `${without.join(" and ")}: not tested on this scan.` : ""
    this.showWarnings()
    this.remember()
  }

  /** What was forced, left out, duplicated or is incomplete, over the scan; the rest can be unfolded. */
  private showWarnings(): void {
    const text = ({ text }: { text: string }) => element("p", {}, text)
    const [grave, notes] = [true, false].map((is) => this.scan!.warnings.filter(({ flag }) => (flag !== "note") === is)) as [
      Scan["warnings"],
      Scan["warnings"],
    ]
    find("#warnings").hidden = !grave.length
    find("#warnings").replaceChildren(...grave.map(text))
    const title = notes.length === 1 ? "1 note about this scan" : `${notes.length} notes about this scan`
    find("#notes").hidden = !notes.length
    find("#notes").replaceChildren(element("summary", {}, title), ...notes.map(text))
  }

  private showCine(plays: boolean): void {
    find("#play").textContent = plays ? "❚❚" : "▶"
    press("#play", plays)
  }

  /** In the address, so that a reload shows the same; numbers only, no patient's name. */
  private remember(): void {
    const told: Record<string, string> = {
      split: this.gallery.splits[this.split]!.name,
      scan: String(this.scan!.number),
      slice: String(this.places[0] + 1),
      a: this.methods[0],
      b: this.methods[1],
    }
    const kept = Object.entries(told).filter(([, value]) => value)
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`)
  }

  private say(text: string): void {
    find("#error").textContent = text
    find("#error").hidden = !text
  }

  private showMissing(): void {
    const root = find("#missing")
    root.hidden = !this.gallery.missing.length
    root.replaceChildren(
      ...this.gallery.missing.map(({ why, command }) => element("p", {}, why, " ", element("code", {}, command))),
    )
  }

  // ------------------------------------------------------------------------------------------------
  // Controls
  // ------------------------------------------------------------------------------------------------

  private makeControls(): void {
    const split = find<HTMLSelectElement>("#split")
    split.replaceChildren(
      ...this.gallery.splits.map(({ name }, number) => element("option", { value: number }, name || "all scans")),
    )
    find("#split-field").hidden = this.gallery.splits.length < 2
    for (const one of document.querySelectorAll(".choice")) one.textContent = this.gallery.choice
    for (const button of document.querySelectorAll<HTMLButtonElement>("#tools button"))
      button.addEventListener("click", () => this.chooseTool(button.dataset["tool"] as Tool))
    find("#full").hidden = !document.fullscreenEnabled
  }

  /** The windows for a modality; the one for its part of the body is chosen. */
  private fillWindows(modality: Modality): void {
    const windows = this.gallery.windows[modality]
    this.window = windows.find(({ first }) => first) ?? windows[0]!
    find("#windows").replaceChildren(
      ...windows.map((window, number) => {
        const { name, title, low, high, unit, note } = window
        const range = low === null ? "" : `${low} to ${high} ${unit}`.trim()
        const hint = `${[range, note].filter(Boolean).join(", ")} (${number + 1})`
        const choose = () => this.chooseWindow(window)
        return element("button", { type: "button", "data-window": name, title: hint, click: choose }, title)
      }),
    )
  }

  private fillMethods(): void {
    const options = this.gallery.splits[this.split]!.methods.map(({ name, title }): [string, string] => [name, title])
    const fill = (selector: string, value: string, extra: [string, string][]) => {
      const select = find<HTMLSelectElement>(selector)
      select.replaceChildren(...[...extra, ...options].map(([name, title]) => element("option", { value: name }, title)))
      select.value = value
    }
    fill("#method-a", this.methods[0], [])
    fill("#method-b", this.methods[1], [["", "nothing"]])
    for (const field of ["#method-field", "#compare-field"]) find(field).hidden = options.length < 2
  }

  private chooseWindow(window: Window | undefined): void {
    if (!window) return
    this.window = window
    this.redraw()
  }

  /** Right is wider, down is a higher level, as on hospital workstations. */
  private dragWindow({ low, high }: Range, x: number, y: number): void {
    const step = Math.max(high - low, 1) / STEP
    const width = Math.max(1, high - low + x * step)
    const level = (low + high) / 2 + y * step
    const own = { name: "own window", title: "", note: "", low: level - width / 2, high: level + width / 2 }
    this.chooseWindow({ ...this.window, ...own })
  }

  private chooseTool(tool: Tool): void {
    this.tool = tool
    this.redraw()
  }

  private toggleFull(): void {
    if (document.fullscreenElement) void document.exitFullscreen()
    else void find("main").requestFullscreen()
  }

  private changeSpeed(step: number): void {
    const speed = find<HTMLSelectElement>("#speed")
    speed.selectedIndex = Math.min(speed.options.length - 1, Math.max(0, speed.selectedIndex + step))
  }

  private toggleBeside(beside: boolean): void {
    this.beside = beside
    this.active = 0
    this.places[1] = this.places[0]
    this.chooseLines()
    this.redraw()
  }

  /** Apart, each panel is at its own method's peak. */
  private toggleLinked(): void {
    this.linked = !this.linked
    this.places = this.linked ? [this.places[0], this.places[0]] : [this.peak(0), this.peak(1)]
    this.redraw()
  }

  private toggleHeads(): void {
    this.heads = !this.heads
    this.redraw()
  }

  private toggleTheme(): void {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches
    const now = document.documentElement.dataset["theme"] ?? (dark ? "dark" : "light")
    document.documentElement.dataset["theme"] = now === "dark" ? "light" : "dark"
  }

  private listen(): void {
    const on = (selector: string, name: string, action: (value: string) => void) =>
      find(selector).addEventListener(name, (event) => action((event.target as HTMLSelectElement).value))
    on("#split", "change", (value) => {
      const kept = new URLSearchParams({ a: this.methods[0], b: this.methods[1], scan: String(this.scan?.number) })
      void this.openSplit(Number(value), kept).catch((error) => this.say(String(error.message)))
    })
    on("#method-a", "change", (value) => this.choose(0, value))
    on("#method-b", "change", (value) => this.choose(1, value))
    on("#over", "click", () => this.toggleBeside(false))
    on("#beside", "click", () => this.toggleBeside(true))
    on("#linked", "click", () => this.toggleLinked())
    on("#heads", "click", () => this.toggleHeads())
    on("#play", "click", () => this.cine.toggle())
    on("#full", "click", () => this.toggleFull())
    on("#whole", "click", () => this.panels.forEach((panel) => panel.zoom()))
    on("#page-button", "click", () => this.showPage(find("main").inert === false))
    on("#list-button", "click", () => document.body.classList.toggle("list"))
    on("#theme", "click", () => this.toggleTheme())
    on("#help-button", "click", () => find<HTMLDialogElement>("#help").showModal())
    on("#help-close", "click", () => find<HTMLDialogElement>("#help").close())
    document.addEventListener("keydown", (event) => this.press(event))
  }

  private press(event: KeyboardEvent): void {
    const target = event.target as HTMLElement
    if (event.key === " " && target.closest("button")) return // presses it
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, select, textarea, dialog")) return
    const panel = this.panels[this.active]!
    const step = (count: number) => () => this.choosePlace(this.places[this.active]! + count)
    const scan = (count: number) => () => {
      const number = this.list.neighbour(count)
      if (number !== null) void this.open(number)
    }
    const actions: Record<string, () => void> = {
      ArrowDown: step(1),
      ArrowRight: step(1),
      ArrowUp: step(-1),
      ArrowLeft: step(-1),
      PageDown: step(PAGE),
      PageUp: step(-PAGE),
      Home: () => this.choosePlace(0),
      End: () => this.choosePlace(Infinity),
      " ": () => this.cine.toggle(),
      ",": () => this.changeSpeed(-1),
      ".": () => this.changeSpeed(1),
      "+": () => panel.zoom(ZOOM),
      "=": () => panel.zoom(ZOOM), // + without shift
      "-": () => panel.zoom(1 / ZOOM),
      "0": () => panel.zoom(),
      w: () => this.chooseTool("window"),
      g: () => this.chooseTool("move"),
      r: () => this.chooseTool("ruler"),
      Delete: () => panel.removeRuler(),
      Backspace: () => panel.removeRuler(),
      f: () => this.toggleFull(),
      h: () => find<HTMLButtonElement>("#heads").click(),
      k: () => this.nextKeySlice(),
      n: scan(1),
      p: scan(-1),
      "/": () => find("#search").focus(),
      "?": () => find<HTMLDialogElement>("#help").showModal(),
    }
    const number = Number(event.key)
    const action = number >= 1 && number <= 9 ? () => this.chooseWindow(this.gallery.windows[this.scan?.modality ?? "CT"][number - 1]) : actions[event.key]
    if (!action) return
    event.preventDefault()
    action()
  }
}

function press(selector: string, pressed: boolean): void {
  find(selector).setAttribute("aria-pressed", String(pressed))
}

/** Asks for the token where the server refuses the page's. */
function askForToken(hint: string): void {
  find("#login-hint").textContent = hint
  find<HTMLDialogElement>("#login").showModal()
  find<HTMLFormElement>("#login form").addEventListener("submit", (event) => {
    event.preventDefault()
    keepToken(find<HTMLInputElement>("#token").value.trim())
    location.reload()
  })
}

function start(): void {
  const isGiven = takeToken() || sessionStorage.length > 0
  window.addEventListener("hashchange", () => takeToken() && location.reload()) // a new address in the same tab
  new Page().start().then(
    () => document.body.classList.add("ready"),
    (error) => {
      if (error instanceof ServerError && error.status === 401)
        return askForToken(isGiven ? "This is not the token: every start of nguide view has a new one." : "")
      find("#error").hidden = false
      find("#error").textContent = error.message
    },
  )
}

start()
