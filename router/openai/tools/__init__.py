"""The tools of a chat: definitions, tool_choice, and the constraints that follow from it."""
