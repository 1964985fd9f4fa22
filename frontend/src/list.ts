/** The list of scans: search, filters, sorting. */

import type { Listed, Method } from "./api"
import { digits, element, shortened } from "./words"

/** What the list is sorted by: a column's name, or the place of a method. */
type Key = "id" | "label" | number

/** What the flags mean. */
const FLAGS: Record<string, string> = {
  forced: "predicted by force: the model was not made for this scan",
  incomplete: "slices are missing or cannot be read",
  "left out": "some slices were left out",
  duplicated: "slices or the whole scan occur twice",
  doubtful: "the order of slices, or their values, had to be guessed or repaired",
}

export class ScanList {
  private scans: Listed[] = []
  private methods: Method[] = []
  private shown: Listed[] = []
  private columns: number[] = []
  private key: Key = 0 // the score: what needs a look first is at the top
  private descending = true
  private current: number | null = null
  private readonly table: HTMLTableElement
  private readonly search: HTMLInputElement
  private readonly label: HTMLSelectElement
  private readonly part: HTMLSelectElement
  private readonly count: HTMLElement

  constructor(
    root: HTMLElement,
    private readonly onChoose: (scan: number) => void,
  ) {
    this.search = root.querySelector("#search")!
    this.label = root.querySelector("#label")!
    this.part = root.querySelector("#part")!
    this.count = root.querySelector("#count")!
    this.table = root.querySelector("table")!
    for (const input of [this.search, this.label, this.part]) input.addEventListener("input", () => this.redraw())
  }

  show(scans: Listed[], methods: Method[]): void {
    this.scans = scans
    this.methods = methods
    const parts = [...new Set(scans.map((scan) => scan.part).filter(Boolean))].sort()
    const before = this.part.value
    this.part.replaceChildren(...["", ...parts].map((part) => element("option", { value: part }, part || "All parts")))
    this.part.value = parts.includes(before) ? before : ""
    this.part.hidden = parts.length < 2
    this.label.hidden = !this.hasLabels
    this.redraw()
  }

  /** Which methods' scores are columns. */
  choose(columns: number[]): void {
    const [first = 0] = columns
    if (typeof this.key === "number" && !columns.includes(this.key)) this.key = first
    this.columns = columns
    this.redraw()
  }

  select(scan: number | null): void {
    this.current = scan
    for (const row of this.table.tBodies[0]?.rows ?? [])
      row.setAttribute("aria-selected", String(row.dataset["number"] === String(scan)))
    this.table.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" })
  }

  /** The scan so many rows further down, as the list stands; the first, where none is open. */
  neighbour(step: number): number | null {
    const at = Math.max(0, this.shown.findIndex((scan) => scan.number === this.current))
    return this.shown[Math.min(this.shown.length - 1, Math.max(0, at + step))]?.number ?? null
  }

  private redraw(): void {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean)
    this.shown = this.scans.filter(
      (scan) =>
        words.every((word) => `${scan.id} ${scan.patient}`.toLowerCase().includes(word)) &&
        (this.label.value === "" || String(scan.label) === this.label.value) &&
        (this.part.value === "" || scan.part === this.part.value),
    )
    this.shown.sort((a, b) => (this.descending ? -1 : 1) * this.compare(a, b) || compareNames(a, b))
    const all = this.scans.length === 1 ? "1 scan" : `${this.scans.length} scans`
    this.count.textContent = this.shown.length === this.scans.length ? all : `${this.shown.length} of ${all}`
    this.table.replaceChildren(this.head(), element("tbody", {}, ...this.shown.map((scan) => this.row(scan))))
    this.select(this.current)
  }

  private compare(a: Listed, b: Listed): number {
    if (this.key === "id") return compareNames(a, b)
    const value = (scan: Listed) => (this.key === "label" ? this.labelOf(scan) : scan.scores[this.key as number]) ?? -1
    return value(a) - value(b)
  }

  /** Scans without labels have the call of the first method instead. */
  private get hasLabels(): boolean {
    return this.scans.some((scan) => scan.label !== null)
  }

  private labelOf(scan: Listed): number | null {
    if (this.hasLabels) return scan.label
    const positive = scan.positive[this.columns[0] ?? 0] ?? null
    return positive === null ? null : Number(positive)
  }

  private head(): HTMLElement {
    const cell = (key: Key, title: string, slot: string, hint: string) => {
      const sorted = this.key !== key ? "none" : this.descending ? "descending" : "ascending"
      const sort = () => {
        // Scores and labels are wanted from the top at first.
        this.descending = this.key === key ? !this.descending : key !== "id"
        this.key = key
        this.redraw()
      }
      const button = element("button", { type: "button", title: hint, click: sort }, title)
      return element("th", { "aria-sort": sorted, class: slot, scope: "col" }, button)
    }
    const scores = this.columns.map((column, place) =>
      cell(column, place ? "B" : this.columns.length > 1 ? "A" : "Score", `score ${place ? "b" : "a"}`, this.methods[column]!.title),
    )
    const label = this.hasLabels ? cell("label", "Label", "label", "By label") : cell("label", "Call", "label", "By the threshold")
    return element("thead", {}, element("tr", {}, cell("id", "Scan", "", "By name"), label, ...scores))
  }

  /** Scans without a prediction, which nobody may take for negative ones. */
  showNotPredicted(scans: { id: string; reason: string }[]): void {
    const root = document.querySelector<HTMLDetailsElement>("#not-predicted")!
    root.hidden = !scans.length
    const title = scans.length === 1 ? "1 scan was not predicted" : `${scans.length} scans were not predicted`
    const each = scans.map(({ id, reason }) => element("p", {}, element("b", {}, id), ` ${reason}`))
    root.replaceChildren(element("summary", {}, title), ...each)
  }

  private row(scan: Listed): HTMLElement {
    const open = () => this.onChoose(scan.number)
    const known = this.labelOf(scan)
    const label = known === null ? "–" : known ? "pos" : "neg"
    const about = [`${scan.slices} slices`, scan.part, scan.patient].filter(Boolean).join(" · ")
    const most = this.columns.length > 1 ? 14 : 21
    const name = element("button", { type: "button", class: "scan", title: scan.id, click: open }, shortened(scan.id, most))
    return element(
      "tr",
      { "data-number": scan.number, click: open },
      element(
        "td",
        {},
        name,
        ...scan.flags.map((flag) => element("span", { class: "flag", title: FLAGS[flag] ?? flag }, flag)),
        element("small", { title: about }, about),
      ),
      element("td", { class: "label" }, element("span", { class: `tag ${label} ${this.hasLabels ? "" : "call"}` }, label)),
      ...this.columns.map((column, place) => score(scan.scores[column] ?? null, place ? "b" : "a")),
    )
  }
}

function compareNames(a: Listed, b: Listed): number {
  return a.id.localeCompare(b.id, undefined, { numeric: true })
}

/** A number over a bar. */
function score(value: number | null, slot: string): HTMLElement {
  const bar = element("i", { style: `width: ${100 * (value ?? 0)}%` })
  return element("td", { class: `score ${slot}` }, digits(value), element("span", { class: "bar" }, bar))
}
