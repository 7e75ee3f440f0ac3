"""The serving role's parts: engines, policy versions, installs, routing. No torch here."""
