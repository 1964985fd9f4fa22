/** Mouse and fingers on a slice. */

import type { Point } from "./display"

/** What dragging does. */
export type Tool = "window" | "move" | "ruler"

export interface Gestures {
  tool(): Tool
  onStep(step: number): void
  /** Pixels right and down since the drag began. */
  onWindow(x: number, y: number, isFirst: boolean): void
  onMove(x: number, y: number): void
  onZoom(factor: number, at: Point): void
  onMeasure(at: Point, isFirst: boolean): void
}

/** Pixels of scrolling that are one slice at least. */
const PIXELS = 50

/** Pixels that one finger goes for a slice, and that a drag needs to be one. */
const SWIPE = 14
const LEAST = 3

/** Zoom for each pixel of the wheel. */
const ZOOM = 1.0025

type Mode = Tool | "slices" | "none"

export function listenToGestures(stage: HTMLElement, gestures: Gestures): void {
  const fingers = new Map<number, Point>()
  let mode: Mode = "none"
  let start: Point = { x: 0, y: 0 }
  let rest = 0
  let begun = false

  const place = (event: MouseEvent): Point => {
    const box = stage.getBoundingClientRect()
    return { x: event.clientX - box.left, y: event.clientY - box.top }
  }
  const modeOf = (event: PointerEvent): Mode => {
    if (event.button === 1 || event.shiftKey) return "move"
    if (event.button) return "none"
    return event.pointerType === "touch" && gestures.tool() === "window" ? "slices" : gestures.tool()
  }
  const drag = (before: Point, now: Point) => {
    if (mode === "move") gestures.onMove(now.x - before.x, now.y - before.y)
    else if (mode === "window") gestures.onWindow(now.x - start.x, now.y - start.y, !begun)
    else if (mode === "ruler") {
      if (!begun) gestures.onMeasure(start, true)
      gestures.onMeasure(now, false)
    } else if (mode === "slices") {
      rest += (now.y - before.y) / SWIPE
      const step = Math.trunc(rest)
      if (step) gestures.onStep(step)
      rest -= step
    }
    begun = true
  }
  const pinch = (moved: number, before: Point, now: Point) => {
    const other = [...fingers].find(([finger]) => finger !== moved)![1]
    const apart = (point: Point) => Math.max(1, Math.hypot(point.x - other.x, point.y - other.y))
    gestures.onMove((now.x - before.x) / 2, (now.y - before.y) / 2)
    gestures.onZoom(apart(now) / apart(before), { x: (now.x + other.x) / 2, y: (now.y + other.y) / 2 })
  }

  stage.addEventListener("pointerdown", (event) => {
    stage.setPointerCapture(event.pointerId)
    start = place(event)
    fingers.set(event.pointerId, start)
    mode = fingers.size > 1 ? "none" : modeOf(event)
    ;[rest, begun] = [0, false]
    if (event.button === 1) event.preventDefault() // no scrolling by the middle button
  })
  stage.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId)
    if (!before) return
    const now = place(event)
    fingers.set(event.pointerId, now)
    if (fingers.size > 1) pinch(event.pointerId, before, now)
    else if (begun || Math.hypot(now.x - start.x, now.y - start.y) >= LEAST) drag(before, now)
  })
  const end = (event: PointerEvent) => fingers.delete(event.pointerId)
  stage.addEventListener("pointerup", end)
  stage.addEventListener("pointercancel", end)
  stage.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return // slices; a pinch on a touch pad comes with ctrl
      event.preventDefault()
      gestures.onZoom(ZOOM ** -event.deltaY, place(event))
    },
    { passive: false },
  )
  listenToWheel(stage, gestures.onStep)
}

/** One slice for each notch of a mouse wheel; a touch pad sends many small steps, which add up. */
export function listenToWheel(target: HTMLElement, onStep: (step: number) => void): void {
  let rest = 0
  target.addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey) return // zoom
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
