/** Numbers and names as the page writes them. */

import type { Curve, Window } from "./api"

/** Three digits, no leading zero, as in the reports. */
export function digits(value: number | null): string {
  if (value === null) return "–"
  const text = value.toFixed(3)
  return text.startsWith("0") ? text.slice(1) : text
}

/** Two digits that count: attention of one slice among hundreds is small. */
export function share(value: number): string {
  if (value === 0) return "0"
  return value >= 0.001 ? digits(value) : value.toExponential(1).replace("e-", "e−")
}

/** With a true minus. */
export function millimetres(value: number): string {
  return `${value.toFixed(1).replace("-", "−")} mm`
}

/** A window's title, width and level. */
export function described({ title, low, high, unit }: Window): string {
  if (low === null || high === null) return title
  const [width, level] = [high - low, (high + low) / 2].map((value) => String(Math.round(value)).replace("-", "−"))
  return `${title}  W ${width} L ${level} ${unit}`.trim()
}

/** The call and what it rests on; null where nothing is known. */
export function call({ probability, threshold, positive }: Curve): string | null {
  if (probability === null) return null
  if (threshold === undefined || threshold === null) return `probability ${digits(probability)}`
  return `${positive ? "positive" : "negative"}: probability ${digits(probability)}, threshold ${digits(threshold)}`
}

/** The number of a slice among the scan's key slices, as every result counts them; null for other slices. */
export function keyNumber({ key_positions }: Curve, place: number): string | null {
  const at = key_positions.indexOf(place)
  return at < 0 ? null : `key slice ${at + 1} of ${key_positions.length}`
}

/** Both ends of a long name: UIDs of a study differ at the end. */
export function shortened(name: string, most = 20): string {
  if (name.length <= most) return name
  const half = Math.floor((most - 1) / 2)
  return `${name.slice(0, most - 1 - half)}…${name.slice(-half)}`
}

type Child = Node | string | null
type Properties = Record<string, string | number | boolean | ((event: never) => void)>

/** An element; text is always text, whatever a scan's name contains. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  properties: Properties = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name, value as EventListener)
    else if (typeof value === "boolean") made.toggleAttribute(name, value)
    else made.setAttribute(name, String(value))
  }
  made.append(...children.filter((child): child is Node | string => child !== null))
  return made
}

/** A shape of a drawing, with its text. */
export function draw(parent: Element, tag: string, attributes: Record<string, string | number>, text = ""): SVGElement {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value))
  made.textContent = text
  parent.append(made)
  return made
}
