"""From an experiment file to runs: `plan` decides (pure), `controller` runs the cells, `session` holds lab and stage hosts."""
