// Signing in.

import {ask} from "./view.js";

const message = document.getElementById("message");

document.getElementById("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  message.textContent = "";
  try {
    await ask("/api/login", {name: document.getElementById("name").value, password: document.getElementById("password").value});
    location.href = "/";
  } catch (error) {
    message.textContent = error.message;
  }
});
document.getElementById("name").focus();
