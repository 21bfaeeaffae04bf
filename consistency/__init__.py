"""What is loaded inside the engines: contracts, operators, traces and the jobs that run them."""
