// Light or dark: as the system says, or as the reader chose last on this machine. For the reports
// and for the server's page: a plain script in the head, so that it is right before anything is
// drawn. The button with the id "theme" goes through the choices; without JavaScript it is hidden.

{
  const KEY = "ridgeline-theme";
  const ORDER = ["auto", "light", "dark"];
  let choice = "auto";

  const stored = () => {
    try { return localStorage.getItem(KEY); } catch { return null; }
  };
  const store = () => {
    try { localStorage.setItem(KEY, choice); } catch { /* a page without storage forgets it */ }
  };
  const apply = () => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${choice}`;
  };

  if (ORDER.includes(stored())) choice = stored();
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.addEventListener("click", () => {
      choice = ORDER[(ORDER.indexOf(choice) + 1) % ORDER.length];
      store();
      apply();
    });
    apply();
  });
}
