"""The handoff: transfers and their states, staging, carriers."""
