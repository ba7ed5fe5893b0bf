// /admin/v1 by the session: every failure is one sentence, and says which fields are meant.

const ROOT = "/admin/v1/";
let csrfToken = "";
let signedOut = () => {};

export class Failure extends Error {
  constructor(status, detail, fields = [], retryAfter = null) {
    super(detail);
    this.status = status;
    this.fields = fields;
    this.retryAfter = retryAfter;
  }
}

export const onSignedOut = (then) => { signedOut = then; };
export const keepToken = (token) => { csrfToken = token; };

async function failure(response) {
  let body = {};
  try { body = await response.json(); } catch { /* not JSON, or cut off */ }
  const detail = body.detail || body.error?.message || `The server answered ${response.status}.`;
  return new Failure(response.status, detail, body.fields || [], response.headers.get("retry-after"));
}

/** A call; ``options``: body, etag (If-Match), key (signs in), signal, keepalive (the window may close meanwhile). Returns {body, etag}. */
export async function call(method, path, options = {}) {
  const headers = { accept: "application/json" };
  if (options.body !== undefined) headers["content-type"] = "application/json";
  if (options.etag) headers["if-match"] = options.etag;
  if (options.key) headers.authorization = `Bearer ${options.key}`;
  else if (method !== "GET") headers["x-csrf-token"] = csrfToken;
  let response;
  try {
    response = await fetch(ROOT + path, {
      method, headers, signal: options.signal, keepalive: options.keepalive, credentials: "same-origin", cache: "no-store",
      body: options.body === undefined ? undefined : JSON.stringify(options.body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The gateway cannot be reached. Is it running?");
  }
  if (!response.ok) {
    const failed = await failure(response);
    if (failed.status === 401 && !options.key && !options.quiet) signedOut();
    throw failed;
  }
  return { body: await response.json(), etag: response.headers.get("etag") };
}

export const get = async (path, options) => (await call("GET", path, options)).body;
export const post = async (path, body, options) => (await call("POST", path, { ...options, body })).body;

/** Every item of a list in pages, up to ``most``. */
export async function all(path, most = 20000, options) {
  const items = [];
  let after = "";
  do {
    const glue = path.includes("?") ? "&" : "?";
    const page = await get(`${path}${glue}limit=500${after && `&after=${encodeURIComponent(after)}`}`, options);
    items.push(...page.data);
    after = page.has_more ? page.next_cursor : "";
  } while (after && items.length < most);
  return items;
}

/** Query parameters, those that are empty left out. */
export function query(values) {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== "" && value !== null && value !== undefined) said.set(name, value);
  }
  return said.toString();
}

/** /v1 with a tenant's key. Returns the response; raises Failure. */
export async function infer(path, body, key, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST", signal, credentials: "omit", body: JSON.stringify(body),
      headers: { "content-type": "application/json", authorization: `Bearer ${key}`, "x-penstock-receipt": "true" },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The gateway cannot be reached.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}
