const form = document.querySelector("form"), rows = [...document.querySelectorAll("article")];
const texts = new Map(rows.map(row => [row,
  [row, ...row.parentElement.querySelectorAll("h2, .prompt")].map(part => part.textContent).join(" ").toLowerCase()]));
function filter() {
  const want = Object.fromEntries(new FormData(form)), text = want.text.toLowerCase();
  let shown = 0;
  for (const row of rows) {
    const reward = Number(row.dataset.reward);
    const fits = (want.least === "" || reward >= Number(want.least))
      && (want.most === "" || reward <= Number(want.most))
      && (want.answer === "" || row.dataset.answer === want.answer)
      && (want.step === "" || row.parentElement.dataset.step === want.step) && texts.get(row).includes(text);
    row.hidden = !fits;
    shown += fits;
  }
  for (const group of document.querySelectorAll("section"))
    group.hidden = !group.querySelector("article:not([hidden])");
  document.querySelector("output").textContent = `${shown} of ${rows.length} rows`;
}
form.addEventListener("input", filter);
form.addEventListener("submit", event => event.preventDefault());
form.hidden = false;
filter();
