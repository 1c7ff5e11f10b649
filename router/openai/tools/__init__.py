"""The tools of a chat: definitions, ``tool_choice``, and the constraints on tool calls."""
