/**
 * How a slice comes to the screen: by NiiVue (WebGL 2), or plainly where the browser has no WebGL 2.
 *
 * NiiVue is given one slice at a time, as a volume of one slice whose pixels are exchanged. A whole scan of 300 slices
 * would be 150 MB before the first picture, and every change of the window would go over all of it; without a graphics
 * card that takes a minute, one slice takes 14 ms.
 */

import { Niivue, NVImage } from "@niivue/niivue"
import type { Image, Window } from "./api"

export interface Range {
  low: number
  high: number
}

const LOW = 0.01
const HIGH = 0.99

/** The range of a window; the slice's own is from the 1st to the 99th percentile of its pixels above the lowest. */
export function rangeOf(window: Window, pixels: Int16Array): Range {
  if (window.low !== null && window.high !== null) return { low: window.low, high: window.high }
  const sorted = Int16Array.from(pixels).sort()
  const above = sorted.subarray(sorted.findIndex((value) => value > sorted[0]!))
  const at = (share: number) => above[Math.round(share * (above.length - 1))]!
  const low = at(LOW)
  return { low, high: Math.max(at(HIGH), low + 1) }
}

export interface Display {
  readonly kind: "webgl" | "canvas"
  /** Resolves when it is drawn. */
  show(pixels: Int16Array, image: Image, window: Range): Promise<void>
}

const INT16 = 4 // NIfTI's code of the data type

class NiivueDisplay implements Display {
  readonly kind = "webgl"
  private volume: NVImage | null = null
  private shape = ""

  private constructor(private readonly niivue: Niivue) {}

  static async open(canvas: HTMLCanvasElement): Promise<NiivueDisplay> {
    const niivue = new Niivue({
      sliceType: 0, // axial
      isRadiologicalConvention: true,
      isOrientationTextVisible: false, // the page writes the letters, which the scan itself knows
      crosshairWidth: 0,
      interactive: false, // wheel, mouse and keys are the page's
      dragAndDropEnabled: false,
      loadingText: "",
      logLevel: "error",
    })
    await niivue.attachToCanvas(canvas, false)
    return new NiivueDisplay(niivue)
  }

  async show(pixels: Int16Array, image: Image, window: Range): Promise<void> {
    const shape = [image.rows, image.columns, ...(image.spacing ?? [])].join()
    if (this.volume && shape === this.shape) {
      this.volume.img = pixels
      this.volume.cal_min = window.low
      this.volume.cal_max = window.high
      this.niivue.updateGLVolume()
      return
    }
    if (this.volume) this.niivue.removeVolume(this.volume)
    this.volume = await volumeOf(pixels, image, window)
    this.shape = shape
    this.niivue.addVolume(this.volume)
  }
}

/** A volume of one slice, oriented so that its first row is at the top and its first column on the left. */
async function volumeOf(pixels: Int16Array, image: Image, window: Range): Promise<NVImage> {
  const [down, across] = image.spacing ?? [1, 1]
  const affine = [-across, 0, 0, 0, 0, -down, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
  const bytes = new Uint8Array(pixels.buffer, pixels.byteOffset, pixels.byteLength)
  const file = NVImage.createNiftiArray([image.columns, image.rows, 1], [across, down, 1], affine, INT16, bytes)
  return NVImage.loadFromUrl({
    url: "slice.nii",
    name: "slice.nii",
    buffer: file.buffer,
    cal_min: window.low,
    cal_max: window.high,
  })
}

class CanvasDisplay implements Display {
  readonly kind = "canvas"
  private last: (() => void) | null = null

  constructor(private readonly canvas: HTMLCanvasElement) {
    new ResizeObserver(() => this.last?.()).observe(canvas.parentElement!)
  }

  async show(pixels: Int16Array, image: Image, window: Range): Promise<void> {
    this.last = () => this.draw(pixels, image, window)
    this.last()
  }

  private draw(pixels: Int16Array, image: Image, window: Range): void {
    const grey = new ImageData(image.columns, image.rows)
    const words = new Uint32Array(grey.data.buffer)
    const scale = 255 / (window.high - window.low)
    for (let place = 0; place < pixels.length; place++) {
      const level = Math.round(Math.min(255, Math.max(0, (pixels[place]! - window.low) * scale)))
      words[place] = 0xff000000 | (level << 16) | (level << 8) | level
    }
    const source = new OffscreenCanvas(image.columns, image.rows)
    source.getContext("2d")!.putImageData(grey, 0, 0)
    const { clientWidth, clientHeight } = this.canvas.parentElement!
    this.canvas.width = clientWidth * devicePixelRatio
    this.canvas.height = clientHeight * devicePixelRatio
    const [down, across] = image.spacing ?? [1, 1]
    const [width, height] = [image.columns * across, image.rows * down]
    const zoom = Math.min(this.canvas.width / width, this.canvas.height / height)
    const context = this.canvas.getContext("2d")!
    context.drawImage(
      source,
      (this.canvas.width - width * zoom) / 2,
      (this.canvas.height - height * zoom) / 2,
      width * zoom,
      height * zoom,
    )
  }
}

/** Puts a canvas into `parent`; falls back where WebGL 2 is missing. */
export async function openDisplay(parent: HTMLElement): Promise<Display> {
  const put = () => {
    const canvas = document.createElement("canvas")
    parent.replaceChildren(canvas)
    return canvas
  }
  if (document.createElement("canvas").getContext("webgl2")) {
    try {
      return await NiivueDisplay.open(put())
    } catch (error) {
      console.warn("NiiVue cannot start; slices are drawn plainly", error)
    }
  }
  return new CanvasDisplay(put())
}
