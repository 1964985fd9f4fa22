/** What the server tells, and how it is asked. Positions of slices count from 0 here; on the page, slices count from 1. */

import { authorization } from "./token"

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
  /** Empty for the reader's own. */
  title: string
  low: number | null
  high: number | null
  /** Of the values: HU, or empty where they have none. */
  unit: string
  note: string
  /** Whether scans are first shown in it. */
  first: boolean
}

export type Modality = "CT" | "MR"

export interface Gallery {
  title: string
  /** The page that is shown first: Report or Predictions, or empty. */
  page: string
  version: string
  splits: Split[]
  /** What the reader chooses: Method or Finding. */
  choice: string
  windows: Record<Modality, Window[]>
  /** Scans that nguide predict refused or could not read. */
  not_predicted: { id: string; reason: string }[]
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
  /** Whether the scores reach their thresholds; null without one. */
  positive: (boolean | null)[]
  /** What is grave about it: forced, incomplete, left out, duplicated, doubtful. */
  flags: string[]
}

export interface Curve {
  probability: number | null
  attention: number[]
  normal: number[]
  /** Empty where there is one head only. */
  heads: number[][]
  /** The highest attention first. */
  key_positions: number[]
  /** Only nguide predict gives these. */
  interval?: { first_position: number; last_position: number; meaning: string } | null
  threshold?: number | null
  positive?: boolean | null
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
  positions_mm: number[] | null
  modality: Modality
  /** SeriesDescription, or empty. */
  series: string
  /** InstanceNumber of every slice, as hospital software shows it. */
  instance_numbers: (number | null)[] | null
  warnings: { flag: string; text: string }[]
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
    answer = await fetch(path, { signal, cache: "no-store", credentials: "omit", headers: { Authorization: authorization() } })
  } catch (error) {
    if (signal?.aborted) throw error
    throw new ServerError("The server does not answer. Is nguide view still running?", 0)
  }
  if (answer.ok) return answer
  if (answer.status === 401) throw new ServerError("The token does not fit; open the address that nguide view printed last.", 401)
  const told = await answer.json().catch(() => ({}))
  throw new ServerError(told.error ?? `The server answers ${answer.status}.`, answer.status)
}

export const readGallery = async (): Promise<Gallery> => (await ask("/api/gallery")).json()

export const readPage = async (): Promise<Blob> => new Blob([await (await ask("/api/page")).blob()], { type: "text/html" })

export const readScans = async (split: number): Promise<Listed[]> => (await ask(`/api/splits/${split}/scans`)).json()

export const readScan = async (split: number, scan: number): Promise<Scan> =>
  (await ask(`/api/splits/${split}/scans/${scan}`)).json()

export async function readSlice(scan: number, place: number, signal: AbortSignal): Promise<Int16Array> {
  // Typed arrays are little-endian wherever browsers run, as the server sends.
  return new Int16Array(await (await ask(`/api/scans/${scan}/pixels/${place}`, signal)).arrayBuffer())
}
