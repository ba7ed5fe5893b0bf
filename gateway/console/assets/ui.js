// What pages are made of: cards, tables, fields, dialogs, and the three states of anything that is fetched.

import { h, newId, put, say, s } from "./dom.js";
import { query } from "./api.js";

export function page(title, intro, actions, ...content) {
  return [
    h("div", {}, h("div", { class: "head" }, h("h1", { tabindex: "-1" }, title), h("div", { class: "buttons" }, actions)), intro && h("p", { class: "soft intro" }, intro)),
    ...content,
  ];
}

export function card(title, actions, ...content) {
  const id = newId("card");
  return h("section", { class: "card", "aria-labelledby": id },
    h("header", {}, h("h2", { id, dir: "auto" }, title), h("div", { class: "buttons" }, actions)), ...content);
}

export const button = (text, onclick, kind = "", more = {}) => h("button", { type: "button", class: `button ${kind}`, onclick, ...more }, text);
export const tag = (text, kind = "") => h("span", { class: `tag ${kind}` }, text);
export const note = (text, kind = "") => h("p", { class: `note ${kind}`, role: kind === "bad" ? "alert" : undefined }, text);

export const empty = (title, text, ...actions) => h("div", { class: "empty" }, h("strong", {}, title), text && h("p", {}, text), ...actions);
export const loading = () => h("div", { class: "bones", role: "status", "aria-label": "Loading" }, h("span"), h("span"), h("span"), h("span"));

const latest = new WeakMap();
/** Shows what ``fetched`` gives, by ``draw``; until then that it is on its way, and what failed with a way to try again. Of several at one
 * place the last that was asked for is shown, whichever comes last. */
export async function shown(place, fetched, draw) {
  const own = {};
  latest.set(place, own);
  const isLatest = () => latest.get(place) === own;
  const hadFocus = place.contains(document.activeElement);
  put(place, loading());
  place.setAttribute("aria-busy", "true");
  try {
    const found = await fetched();
    const drawn = isLatest() && await draw(found);
    if (isLatest()) put(place, drawn);
  } catch (error) {
    if (error.name !== "AbortError" && isLatest()) put(place, note(error.message, "bad"), h("div", { class: "buttons" }, button("Try again", () => shown(place, fetched, draw))));
  } finally {
    if (isLatest()) place.removeAttribute("aria-busy");
    if (hadFocus && document.activeElement === document.body) place.querySelector("[tabindex], button")?.focus({ preventScroll: true });
  }
}

/** To the card in there: what had the focus is gone with what was there before. Returns whether there is one. */
export function lead(place) {
  const found = place.querySelector(".card");
  found?.setAttribute("tabindex", "-1");
  found?.focus();
  return Boolean(found);
}

/** A table; ``columns``: {title, cell(item), num, row (the header of its row), cut, nowrap, wide}. */
export function table(caption, columns, items, options = {}) {
  const body = h("tbody", {}, items.map((item) => h("tr", { class: options.chosen?.(item) ? "chosen" : undefined }, columns.map((column) => h(
    column.row ? "th" : "td",
    { class: [column.num && "num", column.cut && "cut", column.nowrap && "nowrap", column.wide && "wide"].filter(Boolean).join(" ") || undefined, scope: column.row && "row", dir: column.cut && "auto" },
    column.cell(item),
  )))));
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, columns.map(
      (column) => h("th", { scope: "col", class: column.num ? "num" : undefined }, column.unseen ? h("span", { class: "unseen" }, column.title) : column.title)))), body));
}

/** Of a long list that more of it may be shown; ``next`` does so, and ``text`` says what is. */
export const more = (text, next) => h("div", { class: "buttons" }, button("More", async ({ target }) => {
  const place = target.closest(".card");
  target.disabled = true;
  await attempt(next);
  target.disabled = false;
  place.querySelector("[data-more]")?.focus(); // of what is drawn now
}, "", { "data-more": true }), h("span", { class: "small soft" }, text));

/** A labelled input; ``control`` is given an id. ``name`` is the field's in the API, by which refusals find it. */
export function field(label, control, hint, name) {
  control.id = control.id || newId("field");
  const notes = [hint && h("span", { class: "hint", id: `${control.id}-hint` }, hint), h("span", { class: "wrong", id: `${control.id}-wrong` })];
  control.setAttribute("aria-describedby", `${hint ? `${control.id}-hint ` : ""}${control.id}-wrong`);
  return h("div", { class: "field", "data-field": name || control.name }, h("label", { for: control.id }, label), control, notes);
}

export const input = (name, more = {}) => h("input", { name, type: "text", autocomplete: "off", spellcheck: "false", ...more });
export const select = (name, choices, value, more = {}) => h("select", { name, ...more }, choices.map(
  ([key, text]) => h("option", { value: key, selected: key === value }, text)));
export const check = (name, label, checked) => {
  const id = newId("check");
  return h("div", { class: "check" }, h("input", { type: "checkbox", name, id, checked }), h("label", { for: id }, label));
};

/** A form: ``submit(values, form)`` may raise a Failure, which is shown at the fields that it names. */
export function form(content, submit, actions) {
  const wrong = h("div", {});
  const made = h("form", {
    novalidate: true,
    onsubmit: async (event) => {
      event.preventDefault();
      put(wrong);
      for (const control of made.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
      for (const text of made.querySelectorAll(".wrong")) text.textContent = "";
      const buttons = made.querySelectorAll("button[type=submit]");
      buttons.forEach((each) => { each.disabled = true; });
      try {
        await submit(Object.fromEntries(new FormData(made)), made);
      } catch (error) {
        if (error.name === "AbortError") return;
        let first = null;
        const rest = (error.fields || []).filter(({ name, message }) => {
          const place = made.querySelector(`[data-field="${CSS.escape(name.split("[")[0])}"]`); // networks[0] is of networks
          const control = place?.querySelector("input, select, textarea");
          if (!control) return true;
          control.setAttribute("aria-invalid", "true");
          place.querySelector(".wrong").textContent = message;
          first = first || control;
          return false;
        });
        if (rest.length || !first) put(wrong, note(error.message, "bad"));
        first?.focus();
      } finally {
        buttons.forEach((each) => { each.disabled = false; });
      }
    },
  }, content, wrong, h("div", { class: "buttons" }, actions));
  return made;
}

export const submit = (text, kind = "main") => h("button", { type: "submit", class: `button ${kind}` }, text);

/** A dialog; ``draw(close)`` gives its content. Resolves when it is closed. */
export function dialog(title, draw, wide = false) {
  return new Promise((resolve) => {
    const id = newId("dialog");
    const opened = h("dialog", { class: wide ? "wide" : undefined, "aria-labelledby": id });
    let result;
    const close = (value) => { result = value; opened.close(); };
    opened.append(h("div", {}, h("h2", { id, dir: "auto" }, title), draw(close)));
    opened.addEventListener("close", () => { opened.remove(); resolve(result); });
    document.body.append(opened);
    opened.showModal();
  });
}

/** Of what is left: none but a secret, which nobody sees again, is over another page than its own. */
export function closeDialogs() {
  for (const each of document.querySelectorAll("dialog[open]:not(:has(.secret))")) each.close();
}

/** Asks before something that cannot be undone. */
export function sure(title, text, yes) {
  return dialog(title, (close) => [
    h("p", {}, text),
    h("div", { class: "buttons" }, button(yes, () => close(true), "bad"), button("Cancel", () => close(false), "", { autofocus: true })),
  ]);
}

/** A secret that is shown once. What becomes of it is said in its dialog: what is outside is dim there, and is read out to nobody. */
export function secret(value, label) {
  const code = h("code", { "aria-label": label }, value);
  const told = h("p", { class: "small soft outcome", role: "status" });
  return [h("div", { class: "secret" }, code, button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(value);
      put(told, "Copied");
    } catch {
      getSelection().selectAllChildren(code);
      put(told, "Selected: press Ctrl+C");
    }
  })), told];
}

export function toast(text) {
  const shownText = h("div", { class: "toast" }, text);
  document.getElementById("toasts").append(shownText);
  say(text);
  setTimeout(() => shownText.remove(), 4000);
}

/** Does something that may fail, and says how it went. */
export async function attempt(work, done) {
  try {
    const result = await work();
    if (done) toast(done);
    return result;
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message);
    return undefined;
  }
}

/** How much of something is taken. */
export function meter(label, used, ceiling, text) {
  const share = ceiling ? Math.min(1, used / ceiling) : 0;
  const kind = share > 0.95 ? "bad" : share > 0.8 ? "warn" : "";
  return h("div", { class: "meter" }, h("div", { class: "small" }, text),
    h("div", { class: "bar", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": ceiling, "aria-valuenow": Math.min(used, ceiling), "aria-valuetext": text },
      s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { class: `fill ${kind}`, width: 100 * share, height: 8 }))));
}

export const facts = (pairs) => h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

export const swatch = (number) => s("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" }, s("rect", { class: `s${number}`, width: 12, height: 12, rx: 3 }));

/** A place in the console: link("requests", {tenant_id: id}). */
export const link = (name, values = {}) => `#/${name}${Object.keys(values).length ? `?${query(values)}` : ""}`;
