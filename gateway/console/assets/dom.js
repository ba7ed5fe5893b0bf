// Elements out of words. Whatever text comes in becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter((child) => child !== undefined && child !== null && child !== false).map(
    (child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return node;
}

/** An HTML element: h("p", {class: "soft", onclick: f}, "text", another). */
export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);

/** The same of SVG. */
export const s = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Puts these in the place of all that is in there. */
export function put(node, ...children) {
  node.replaceChildren();
  fill(node, {}, children);
  return node;
}

let made = 0;
/** An id that nothing else has. */
export const newId = (word = "id") => `${word}-${++made}`;

/** Says something to whoever hears the page rather than sees it. */
export function say(text) {
  const said = document.getElementById("said");
  said.textContent = "";
  requestAnimationFrame(() => { said.textContent = text; });
}
