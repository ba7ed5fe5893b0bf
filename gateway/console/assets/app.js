// Who is signed in, which page is shown, and what is around it.

import { call, get, keepToken, onSignedOut } from "./api.js";
import { recolour } from "./charts.js";
import { h, put, say } from "./dom.js";
import { forget } from "./live.js";
import { card, closeDialogs, field, form, input, lead, loading, note, select, submit } from "./ui.js";

const PAGES = [
  ["overview", "Overview", "operator"],
  ["tenants", "Tenants and keys", "operator"],
  ["policies", "Policies", "operator"],
  ["usage", "Usage and cost", "billing_reader"],
  ["requests", "Requests", "billing_reader"],
  ["workers", "Workers", "operator"],
  ["playground", "Playground", "operator"],
];
const app = document.getElementById("app");
let me = null;
let main = null;
let close = () => {};
let shownPage = "";

const may = (role) => me.role !== "billing_reader" || role === "billing_reader";

function themeSwitch() {
  const chosen = document.documentElement.dataset.theme || "";
  const choice = select("theme", [["", "As the system"], ["light", "Light"], ["dark", "Dark"]], chosen, {
    onchange: () => {
      if (choice.value) document.documentElement.dataset.theme = choice.value;
      else delete document.documentElement.dataset.theme;
      try { localStorage.setItem("theme", choice.value); } catch { /* for now only */ }
      recolour();
    },
  });
  return field("Theme", choice);
}

function signIn(reason) {
  forget();
  closeDialogs();
  close();
  close = () => {};
  me = null;
  remember(false);
  shownPage = "";
  document.title = "Sign in · Penstock";
  const key = input("key", { type: "password", autocomplete: "current-password", required: true });
  put(app, h("main", { class: "center", id: "content" }, h("section", { class: "card signin" },
    h("div", { class: "brand" }, h("img", { src: "/console/assets/icon.svg", alt: "" }), "Penstock"),
    h("h1", {}, "Sign in"),
    reason && note(reason, "warn"),
    form([field("Admin key", key, "It begins with sk-penstock-admin-. The first start keeps one in data/bootstrap.env.")], async (values) => {
      const typed = values.key.trim();
      if (!typed) throw Object.assign(new Error("Type or paste an admin key."), { fields: [{ name: "key", message: "Type or paste an admin key." }] });
      if (/[^\x21-\x7e]/.test(typed)) throw Object.assign(new Error(""), { fields: [{ name: "key", message: "A key has no such characters." }] });
      try {
        begin((await call("POST", "session", { key: typed })).body);
      } catch (error) {
        if (error.status === 401) throw Object.assign(error, { fields: [{ name: "key", message: "This key does not open the administration." }] });
        throw error;
      }
    }, [submit("Sign in")]))));
  key.focus();
}

async function signOut() {
  await close();
  close = () => {};
  try { await call("DELETE", "session", { quiet: true }); } catch { /* it is over in any case */ }
  signIn("");
  say("You have signed out.");
}

function remember(isIn) {
  try { localStorage.setItem("signed-in", isIn ? "yes" : "no"); } catch { /* then it is asked for each time */ }
}

function begin(signedIn) {
  me = signedIn;
  remember(true);
  keepToken(me.csrf_token);
  main = h("main", { class: "page", id: "content" });
  const links = PAGES.filter(([, , role]) => may(role)).map(([name, title]) => h("li", {}, h("a", { href: `#/${name}`, "data-page": name }, title)));
  put(app, h("div", { class: "frame" },
    h("header", { class: "side" },
      h("div", { class: "brand" }, h("img", { src: "/console/assets/icon.svg", alt: "" }), "Penstock"),
      h("nav", { "aria-label": "Pages" }, h("ul", {}, links)),
      h("div", { class: "foot" },
        themeSwitch(),
        h("div", { class: "small" }, h("strong", {}, me.name || "Admin key"), h("br"), h("span", { class: "soft" }, me.role.replace("_", " "))),
        h("button", { type: "button", class: "button", onclick: signOut }, "Sign out"))),
    main));
  show();
}

/** What had the focus is gone with what it was in: on to what was chosen, into view, or to the top of the page. */
function goOn() {
  const chosen = main.querySelector("[data-chosen]");
  if (!chosen || !lead(chosen)) main.querySelector("h1")?.focus({ preventScroll: true });
}

async function show() {
  if (!me) return;
  const [path, said] = location.hash.replace(/^#\/?/, "").split("?");
  const found = PAGES.find(([name, , role]) => name === path && may(role)) || PAGES.find(([, , role]) => may(role));
  const [name, title] = found;
  const isOther = name !== shownPage;
  const isWithin = main.contains(document.activeElement) || document.activeElement === document.body; // a button that is disabled has no focus
  close();
  close = () => {};
  for (const each of document.querySelectorAll("[data-page]")) {
    if (each.dataset.page === name) {
      each.setAttribute("aria-current", "page");
      if (isOther) each.scrollIntoView({ block: "nearest", inline: "nearest" }); // on narrow screens it may be out of sight
    } else each.removeAttribute("aria-current");
  }
  document.title = `${title} · Penstock`;
  main.setAttribute("aria-busy", "true");
  if (isOther) put(main, h("h1", {}, title), loading());
  shownPage = name;
  const closers = [];
  const token = {};
  show.latest = token;
  try {
    const page = await import(`./pages/${name}.js`);
    const content = await page.open({ me, values: Object.fromEntries(new URLSearchParams(said || "")), closing: (work) => closers.push(work), again: show });
    const closed = () => Promise.all(closers.map((work) => work()));
    if (show.latest !== token || !me) return closed();
    close = closed;
    put(main, content);
    if (isOther && document.activeElement?.matches("[data-page]")) main.querySelector("h1")?.focus({ preventScroll: true });
    if (isOther) window.scrollTo(0, 0);
    if (isOther ? said && main.querySelector("[data-chosen] > .card") : isWithin) goOn(); // a link to one of many leads there
  } catch (error) {
    closers.forEach((work) => work());
    if (show.latest === token && me) put(main, h("h1", {}, title), card("This page could not be shown", [], note(error.message, "bad"), h("div", { class: "buttons" }, h("button", { type: "button", class: "button", onclick: show }, "Try again"))));
  } finally {
    if (show.latest === token) main.removeAttribute("aria-busy");
  }
}

onSignedOut(() => { if (me) signIn("Your session is over. Please sign in again."); });
addEventListener("hashchange", () => {
  closeDialogs();
  show();
});
// All tabs have one session: who signs in or out in another one does so here.
addEventListener("storage", async ({ key, newValue }) => {
  if (key !== "signed-in") return;
  if (newValue === "yes") await get("session", { quiet: true }).then(begin, () => {});
  else if (me) signIn("Your session is over. Please sign in again.");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

// Without the note nobody has signed in here, and asking would only be refused.
let wasIn = true;
try { wasIn = localStorage.getItem("signed-in") === "yes"; } catch { /* asked for, then */ }
try {
  if (wasIn) begin(await get("session", { quiet: true }));
  else signIn("");
} catch (error) {
  signIn(error.status === 0 || error.status >= 500 ? error.message : "");
}
