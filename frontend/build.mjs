// Bundles the page into the Python package's static folder, from which `nguide view` serves it.
// Everything that the page needs is inside: it loads nothing from anywhere else.

import { build } from "esbuild"
import { copyFile, mkdir, readdir, readFile, rename, rm, writeFile } from "node:fs/promises"
import { dirname, join } from "node:path"
import { fileURLToPath } from "node:url"

const here = dirname(fileURLToPath(import.meta.url))
const out = join(here, "..", "src", "normal_guidance", "viewer", "static")
const draft = `${out}.partial`

/** Packages that come without their licence's text. */
const TEXTS = { "@niivue/niivue": join(here, "licenses", "niivue.txt") }

/** The licence texts of all packages that the page contains or that NiiVue was built from. */
async function licenses() {
  const lock = JSON.parse(await readFile(join(here, "package-lock.json"), "utf8"))
  const texts = []
  for (const [path, about] of Object.entries(lock.packages)) {
    if (!path || about.dev || about.optional) continue
    const folder = join(here, path)
    const name = path.replace(/^.*node_modules\//, "")
    const own = (await readdir(folder)).find((entry) => /^licen[cs]e/i.test(entry))
    const file = TEXTS[name] ?? (own && join(folder, own))
    if (!file) throw new Error(`${name} has no licence text; add one to licenses/ and to TEXTS`)
    texts.push(`${name} ${about.version} (${about.license})\n\n${(await readFile(file, "utf8")).trim()}`)
  }
  return `${texts.join(`\n\n${"-".repeat(80)}\n\n`)}\n`
}

await rm(draft, { recursive: true, force: true })
await mkdir(draft, { recursive: true })
await build({
  entryPoints: [join(here, "src", "main.ts")],
  outfile: join(draft, "app.js"),
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none", // they are in licenses.txt
  // The package's entry is 60 modules that do the same; this is its own bundle, readable and not minified.
  alias: { "@niivue/niivue": join(here, "node_modules", "@niivue", "niivue", "dist", "index.js") },
  logLevel: "warning",
})
for (const file of ["index.html", "style.css", "icon.svg"]) await copyFile(join(here, "src", file), join(draft, file))
await writeFile(join(draft, "licenses.txt"), await licenses())
await rm(out, { recursive: true, force: true })
await rename(draft, out) // nobody sees half a page
console.log(`built ${out}`)
