"""Which geometry to use: time and device-hours to a target, and what a wrong choice costs."""
