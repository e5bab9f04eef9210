// Hides each element with a data-group whose data-names lack a word of the search field.
const field = document.getElementById("search"), count = document.getElementById("found");
const groups = [...document.querySelectorAll("[data-group]")];
const names = new Map(groups.map(one => [one, one.dataset.names.toLowerCase()]));
field.parentElement.hidden = false;
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = new Set();
  for (const one of groups) {
    const isFound = words.every(word => names.get(one).includes(word));
    one.hidden = !isFound;
    if (isFound) shown.add(one.dataset.group);
  }
  count.textContent = words.length ? `${shown.size} found` : "";
});
