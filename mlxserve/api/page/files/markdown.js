// Markdown, parsed by the server into a tree, is built here element by element, of known names only. Each node
// of the tree is one node of the page, so that a tree that follows another changes what differs and no more.

import { copy } from "./clipboard.js";
import { button, element, grow, visible } from "./show.js";

const MATH = "http://www.w3.org/1998/Math/MathML";
const ATTRIBUTES = { ol: ["start"], th: ["class"], td: ["class"], span: ["class"], div: ["class"] };
const TAGS = new Set(("p h1 h2 h3 h4 h5 h6 ul ol li blockquote br hr s em strong code pre span div a table "
  + "thead tbody tr th td").split(" "));
const MATH_TAGS = new Set(("math mrow mi mo mn ms msup msub msubsup mfrac msqrt mroot mtext mtable mtr mtd mstyle "
  + "mover munder munderover mspace mpadded mphantom menclose mmultiscripts merror").split(" "));
const MATH_ATTRIBUTES = new Set(("accent columnalign columnlines displaystyle display fence form linethickness "
  + "lspace mathvariant maxsize minsize movablelimits rowlines rspace scriptlevel separator stretchy width").split(" "));
const DIRECTED = new Set("p h1 h2 h3 h4 h5 h6 li blockquote td th div".split(" ")); // each by its own text
const LINK = /^(https?:\/\/|mailto:)/i;

// Changes what shows one list of nodes into what shows another. A selection in what stays or grows is kept.
export function update(into, before, after) {
  while (into.childNodes.length > after.length) into.lastChild.remove();
  after.forEach((node, at) => {
    if (at >= before.length) into.append(built(node));
    else if (node !== before[at] && JSON.stringify(node) !== JSON.stringify(before[at])) change(into.childNodes[at], before[at], node);
  });
}

function change(shown, before, node) {
  if (typeof node === "string" && typeof before === "string") grow(shown, visible(node));
  else if (isAlike(node, before)) update(childrenOf(shown, node[0]), before.slice(2), node.slice(2));
  else shown.replaceWith(built(node));
}

const isAlike = ([tag, attributes], [otherTag, others]) =>
  tag === otherTag && JSON.stringify(attributes) === JSON.stringify(others);

// The element with a node's children, in the one that was built for it.
function childrenOf(shown, tag) {
  if (tag === "table") return shown.firstChild;
  return tag === "pre" ? shown.querySelector("code") : shown;
}

function built(node) {
  if (typeof node === "string") return visible(node);
  const [tag, attributes, ...children] = node;
  if (MATH_TAGS.has(tag)) return math(tag, attributes, children);
  const parts = children.map(built);
  if (tag === "pre") return code(attributes.language, parts);
  if (!TAGS.has(tag)) return element("span", "", ...parts);
  const made = element(tag, "", ...parts);
  if (DIRECTED.has(tag)) made.dir = "auto";
  for (const name of ATTRIBUTES[tag] || []) if (name in attributes) made.setAttribute(name, attributes[name]);
  if (tag === "a" && LINK.test(attributes.href)) {
    Object.assign(made, { href: attributes.href, rel: "noopener noreferrer", target: "_blank", title: attributes.href });
  }
  if (tag !== "table") return made;
  const scrolled = element("div", "table", made);
  scrolled.tabIndex = 0; // so that a keyboard can scroll it
  scrolled.role = "region";
  scrolled.ariaLabel = "Table";
  return scrolled;
}

function math(tag, attributes, children) {
  const made = document.createElementNS(MATH, tag);
  for (const [name, value] of Object.entries(attributes)) if (MATH_ATTRIBUTES.has(name)) made.setAttribute(name, value);
  made.append(...children.map(built));
  return made;
}

function code(language, parts) {
  const text = element("code", "", ...parts);
  const block = element("pre", "", text);
  block.tabIndex = 0; // so that a keyboard can scroll it
  const head = element("div", "head", element("span", "", visible(language || "")),
    button("Copy", (event) => copy(text.textContent, event.target), "Copy the code"));
  return element("div", "code", head, block);
}
