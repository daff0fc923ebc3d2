// Light or dark: as the system says, or as the reader chose last on this machine.

const button = document.getElementById("theme");
const ORDER = ["auto", "light", "dark"];
let choice = localStorage.getItem("ridgeline-theme");
if (!ORDER.includes(choice)) choice = "auto";

function apply() {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  button.textContent = `Theme: ${choice}`;
}

button.addEventListener("click", () => {
  choice = ORDER[(ORDER.indexOf(choice) + 1) % ORDER.length];
  localStorage.setItem("ridgeline-theme", choice);
  apply();
});
apply();
