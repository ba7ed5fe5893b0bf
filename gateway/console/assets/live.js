// One stream of snapshots for all pages, while somebody looks. What is kept is bounded.

import { get } from "./api.js";

export const KEPT_S = 300;
const listeners = new Set();
const snapshots = [];
let source = null;
let state = "connecting";

function open() {
  source = new EventSource(`/admin/v1/live?history=${snapshots.length ? 0 : KEPT_S}`);
  source.onmessage = (event) => {
    const snapshot = JSON.parse(event.data);
    const last = snapshots[snapshots.length - 1];
    if (last && snapshot.at <= last.at) {
      if (snapshots.some((each) => each.at === snapshot.at)) return; // told again with a new connection
      snapshots.length = 0; // the gateway's clock was set back
    }
    snapshots.push(snapshot);
    if (snapshots.length > KEPT_S) snapshots.splice(0, snapshots.length - KEPT_S);
    state = "live";
    // What came before is drawn with the latest, once.
    if (!pending) pending = requestAnimationFrame(tell);
  };
  source.onerror = () => {
    state = "away";
    if (source && source.readyState === EventSource.CLOSED) {
      shut();
      again = setTimeout(open, 3000);
      get("session").catch(() => {}); // an event source does not say why: where the session is over, this leads to signing in
    }
    for (const listener of listeners) listener(snapshots, state);
  };
}

let pending = 0;
let again = 0;
function tell() {
  pending = 0;
  for (const listener of listeners) listener(snapshots, state);
}

function shut() {
  source?.close();
  source = null;
  clearTimeout(again);
}

/** Calls ``listener(snapshots, state)`` with each new one until the returned function is called. */
export function watch(listener) {
  listeners.add(listener);
  if (!source) open();
  if (snapshots.length) listener(snapshots, state);
  return () => {
    listeners.delete(listener);
    if (!listeners.size) shut();
  };
}

/** Nobody is signed in any more. */
export function forget() {
  shut();
  listeners.clear();
  snapshots.length = 0;
}
