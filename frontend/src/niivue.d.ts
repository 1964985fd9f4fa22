/** The part of NiiVue that the page uses. */
declare module "@niivue/niivue" {
  export class NVImage {
    img: Int16Array
    cal_min: number
    cal_max: number
    static createNiftiArray(
      dims: number[],
      pixDims: number[],
      affine: number[],
      datatypeCode: number,
      img: Uint8Array,
    ): Uint8Array<ArrayBuffer>
    static loadFromUrl(options: {
      url: string
      name: string
      buffer: ArrayBuffer
      cal_min: number
      cal_max: number
    }): Promise<NVImage>
  }
  export class Niivue {
    constructor(options: Record<string, unknown>)
    gl: WebGL2RenderingContext
    volumes: NVImage[]
    attachToCanvas(canvas: HTMLCanvasElement, antialias: boolean): Promise<this>
    addVolume(volume: NVImage): void
    removeVolume(volume: NVImage): void
    updateGLVolume(): void
    drawScene(): void
  }
}
