// The box above the errors: it keeps the rows that hold every word, or else those with the most words of the message.
(() => {
  const box = document.querySelector(".errors-search");
  const rows = [...document.querySelectorAll("article tbody tr")].map((row) => ({ row, text: row.textContent.toLowerCase() }));
  const tables = [...document.querySelectorAll("article table")].map((table) => {
    const part = [table.closest(".md-typeset__scrollwrap") || table];
    while (part[0].tagName !== "H2") part.unshift(part[0].previousElementSibling);
    return { table, part };
  });
  const show = () => {
    const words = box.firstElementChild.value.toLowerCase().split(/[^\p{L}\p{N}_.]+/u).filter((word) => word.length > 1);
    const share = rows.map(({ text }) => words.filter((word) => text.includes(word)).length);
    const most = Math.max(...share);
    const exact = most === words.length;
    const enough = exact ? most : Math.max(2, most - 1);
    let kept = 0;
    rows.forEach(({ row }, place) => {
      row.hidden = words.length > 0 && share[place] < enough;
      kept += row.hidden ? 0 : 1;
    });
    tables.forEach(({ table, part }) => {
      const none = !table.querySelector("tbody tr:not([hidden])");
      part.forEach((element) => (element.hidden = none));
    });
    box.lastElementChild.textContent = words.length ? `${kept} ${exact || !kept ? "found" : "that are nearest"}` : `${rows.length} messages`;
  };
  box.firstElementChild.addEventListener("input", show);
  box.hidden = false;
  show();
})();
