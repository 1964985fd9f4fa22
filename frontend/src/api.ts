/** What the server tells, and how it is asked. Places of slices count from 0 here and from 1 on the page. */

export interface Method {
  name: string
  title: string
}

export interface Split {
  name: string
  methods: Method[]
}

/** Lowest and highest value that are told apart; null for the slice's own range. */
export interface Window {
  name: string
  title: string
  low: number | null
  high: number | null
  /** Of the values: HU, or empty where they have none. */
  unit: string
}

export interface Gallery {
  title: string
  version: string
  splits: Split[]
  windows: Window[]
  missing: { what: string; why: string; command: string }[]
}

export interface Listed {
  number: number
  id: string
  patient: string
  slices: number
  part: string
  label: number | null
  /** By the split's methods. */
  scores: (number | null)[]
}

export interface Curve {
  probability: number | null
  attention: number[]
  normal: number[]
  /** Empty where there is one head only. */
  heads: number[][]
  key_slices: number[]
}

export interface Image {
  rows: number
  columns: number
  /** mm between rows, mm between columns. */
  spacing: [number, number] | null
  /** What lies at the edges: R, L, A, P, H, F. */
  letters: { left: string; right: string; top: string; bottom: string } | null
}

export interface Scan {
  number: number
  id: string
  patient: string
  slices: number
  part: string
  label: number | null
  methods: Record<string, Curve | null>
  image: Image | null
  truth: number[] | null
  positions: number[] | null
  note: string | null
}

export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message)
  }
}

async function ask(path: string, signal?: AbortSignal): Promise<Response> {
  let answer: Response
  try {
    answer = await fetch(path, { signal, cache: "no-store", credentials: "same-origin" })
  } catch (error) {
    if (signal?.aborted) throw error
    throw new ServerError("The server does not answer. Is nguide view still running?", 0)
  }
  if (answer.ok) return answer
  if (answer.status === 401) throw new ServerError("The server was started anew; open the address that it printed.", 401)
  const told = await answer.json().catch(() => ({}))
  throw new ServerError(told.error ?? `The server answers ${answer.status}.`, answer.status)
}

export const readGallery = async (): Promise<Gallery> => (await ask("/api/gallery")).json()

export const readScans = async (split: number): Promise<Listed[]> => (await ask(`/api/splits/${split}/scans`)).json()

export const readScan = async (split: number, scan: number): Promise<Scan> =>
  (await ask(`/api/splits/${split}/scans/${scan}`)).json()

export async function readSlice(scan: number, place: number, signal: AbortSignal): Promise<Int16Array> {
  // Typed arrays are little-endian wherever browsers run, as the server sends.
  return new Int16Array(await (await ask(`/api/scans/${scan}/slices/${place}`, signal)).arrayBuffer())
}
