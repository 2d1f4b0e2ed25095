// a long name breaks between its words, and a short text with an option stays in a line
const between = /(?<=[._/=(])(?=\w)|(?<=[a-z\d])(?=[A-Z])/;
for (const place of document.querySelectorAll("article :is(td, th) code, article .doc-object-name")) {
  for (const node of [...place.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE)) {
    node.replaceWith(...node.data.split(between).flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part])));
  }
}
for (const code of document.querySelectorAll("article :is(p, li, dd) code")) {
  if (code.textContent.includes("-") && code.textContent.length < 32) code.style.whiteSpace = "nowrap";
}
