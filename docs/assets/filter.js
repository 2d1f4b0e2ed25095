// a field above each long table: rows without its text are hidden
for (const table of document.querySelectorAll("article table")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 40 || document.getElementById("families-filter")) continue; // which has a filter of its own
  const field = document.createElement("input");
  Object.assign(field, { type: "search", placeholder: `search in ${rows.length} rows`, className: "table-filter" });
  field.oninput = () => {
    const text = field.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(text);
  };
  table.before(field);
}
