"""DeepSeek-V4 operators as vLLM runs them, at the widths of Flash: described for the survey, with the routes that could become exact."""
