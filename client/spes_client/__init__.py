"""Programs of volunteers, organizers and researchers: spes-join, spes, spes-replay. They parse, show and control."""
