// The box above the errors: it keeps the rows that hold every word, or else those with the most words of the message.
(() => {
  const box = document.querySelector(".errors-search");
  const tables = [...document.querySelectorAll("article table")];
  const rows = [...document.querySelectorAll("article tbody tr")].map((row) => ({ row, text: row.textContent.toLowerCase() }));

  const sectionOf = (table) => {
    const part = [table.closest(".md-typeset__scrollwrap") || table]; // the theme wraps tables after this has run
    while (part[0].tagName !== "H2") part.unshift(part[0].previousElementSibling);
    return part;
  };

  const show = () => {
    const words = box.firstElementChild.value.toLowerCase().split(/[^\p{L}\p{N}_.]+/u).filter((word) => word.length > 1);
    const held = rows.map(({ text }) => words.filter((word) => text.includes(word)).length);
    const most = Math.max(...held);
    rows.forEach(({ row }, place) => (row.hidden = held[place] < Math.max(most, Math.min(words.length, 2))));
    for (const table of tables) {
      const none = !table.querySelector("tbody tr:not([hidden])");
      sectionOf(table).forEach((element) => (element.hidden = none));
    }
    const count = rows.filter(({ row }) => !row.hidden).length;
    const about = most === words.length ? "messages" : "messages have most of these words; none has all";
    box.lastElementChild.textContent = `${count} ${about}`;
  };

  box.firstElementChild.addEventListener("input", show);
  box.hidden = false;
  show();
})();
