// Print what the search of a built site finds: node search.js SITE QUERY...

const fs = require("fs");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const files = ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"];
const code = files.map((name) => fs.readFileSync(`${site}/${name}`, "utf8"));
code.push("(query) => Search._performSearch(...Search._parseQuery(query)).reverse()");
const browser = { document: { getElementById: () => null }, _: (text) => text };
browser.window = browser;
const names = { SPHINX_HIGHLIGHT_ENABLED: false, _ready: () => null };
const search = vm.runInNewContext(code.join(";\n"), Object.assign(browser, names));
const found = queries.map((query) => search(query).map(([page, , anchor]) => page + anchor));
console.log(JSON.stringify(found));
