// The filter: shows the trials whose row holds every word, and whose status is ticked.
"use strict";
(() => {
  const rows = [...document.querySelectorAll("#list tbody tr")].map((row) => ({
    row, status: row.dataset.status, text: row.textContent.toLowerCase(),
  }));
  const cells = [...document.querySelectorAll(".marks td[data-trial]")];
  const shown = document.getElementById("shown");
  const all = shown.textContent;

  function apply() {
    const words = document.getElementById("words").value.toLowerCase().split(/\s+/);
    const ticked = new Set([...document.querySelectorAll("#filter :checked")].map((box) => box.value));
    let count = 0;
    for (const { row, status, text } of rows) {
      row.hidden = !ticked.has(status) || !words.every((word) => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    for (const cell of cells) cell.classList.toggle("out", rows[cell.dataset.trial].row.hidden);
    for (const row of document.querySelectorAll(".marks tbody tr")) {
      row.hidden = !row.querySelector("td[data-trial]:not(.out)");
    }
    for (const grid of document.querySelectorAll(".grid")) {
      grid.hidden = !grid.querySelector("tbody tr:not([hidden])");
    }
    shown.textContent = count === rows.length ? all : `${count} of ${all}`;
  }

  document.getElementById("filter").addEventListener("input", apply);
  document.getElementById("filter").addEventListener("submit", (event) => event.preventDefault());
  apply();  // a browser may have kept the words over a reload
})();
