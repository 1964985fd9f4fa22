/**
 * The secret of this server: behind the # of the address, which browsers do not send; then in the tab's session
 * storage, which no other port can read.
 */

const KEY = "token"

/** Takes the token out of the address; whether there was one. */
export function takeToken(): boolean {
  const asked = new URLSearchParams(location.hash.slice(1))
  const token = asked.get(KEY)
  if (token === null) return false
  keepToken(token)
  asked.delete(KEY)
  history.replaceState(null, "", asked.size ? `#${asked}` : location.pathname)
  return true
}

export function keepToken(token: string): void {
  sessionStorage.setItem(KEY, token)
}

export const authorization = (): string => `Bearer ${sessionStorage.getItem(KEY) ?? ""}`
