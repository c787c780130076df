"""What a scientific statement about runs needs: experiments, comparisons, tables. `cory` never imports it."""
