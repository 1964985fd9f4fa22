/** Slice after slice, as a film. */

export class Cine {
  private timer = 0

  /** `advance` goes to the next slice, or does nothing while the last one is still on its way. */
  constructor(
    private readonly advance: () => void,
    private readonly perSecond: () => number,
    private readonly onChange: (plays: boolean) => void,
  ) {}

  get plays(): boolean {
    return this.timer !== 0
  }

  toggle(): void {
    if (this.plays) this.stop()
    else this.wait()
    this.onChange(this.plays)
  }

  stop(): void {
    clearTimeout(this.timer)
    this.timer = 0
    this.onChange(false)
  }

  private wait(): void {
    this.timer = window.setTimeout(() => {
      this.wait()
      this.advance()
    }, 1000 / this.perSecond())
  }
}
