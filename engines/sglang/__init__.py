"""SGLang: a plugin that records rounds and puts published numbers of steps in force."""
