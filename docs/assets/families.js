// A filter over the rows of the page of families: by name, by what they work with, by the share of a rank.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("families-filter");
  if (!place) return;
  const words = ["sp", "cp", "pp", "experts", "LoRA", "generate", "serve"];
  const boxes = words.map((w) => `<label><input type="checkbox" value="${w}"> ${w}</label>`).join(" ");
  place.innerHTML = `<input type="search" placeholder="model_type" aria-label="model_type"> ${boxes}
    <label>at most <input type="number" value="100" min="0" max="100" aria-label="percent"> % on a rank</label>
    <output></output>`;
  const rows = [...document.querySelectorAll("table")]
    .filter((t) => t.rows[0].cells[0].textContent.trim() === "type")
    .flatMap((t) => [...t.rows].slice(1));
  const show = () => {
    const name = place.querySelector("[type=search]").value.trim();
    const most = Number(place.querySelector("[type=number]").value);
    const asked = [...place.querySelectorAll(":checked")].map((box) => box.value);
    let shown = 0;
    for (const row of rows) {
      const [type, share, beside] = [...row.cells].map((cell) => cell.textContent.trim());
      const has = beside.split(" ");
      const fits = type.includes(name) && parseInt(share) <= most && asked.every((w) => has.includes(w));
      row.hidden = !fits;
      shown += fits;
    }
    place.querySelector("output").textContent = `${shown} of ${rows.length} types`;
  };
  place.addEventListener("input", show);
  show();
});
