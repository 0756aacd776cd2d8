"""Configuration groups. Every option of every group is listed, with its unit and scope.

Scopes: *trajectory* decides the loss curve; *run* decides memory and time but not the loss curve;
*display* changes neither, so that a run is not repeated because of it.
"""
