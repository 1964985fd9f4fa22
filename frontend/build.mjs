// Bundles the page into the Python package's static folder, from which `nguide view` serves it.
// Everything that the page needs is inside: it loads nothing from anywhere else.

import { build } from "esbuild"
import { copyFile, mkdir, rename, rm } from "node:fs/promises"
import { dirname, join } from "node:path"
import { fileURLToPath } from "node:url"

const here = dirname(fileURLToPath(import.meta.url))
const out = join(here, "..", "src", "normal_guidance", "clinic", "viewer", "static")
const draft = `${out}.partial`

await rm(draft, { recursive: true, force: true })
await mkdir(draft, { recursive: true })
await build({
  entryPoints: [join(here, "src", "main.ts")],
  outfile: join(draft, "app.js"),
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  logLevel: "warning",
})
for (const file of ["index.html", "style.css", "icon.svg"]) await copyFile(join(here, "src", file), join(draft, file))
await rm(out, { recursive: true, force: true })
await rename(draft, out) // nobody sees half a page
console.log(`built ${out}`)
