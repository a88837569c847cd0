"""The explorer: checkpoints and run directories in a browser, on this machine only, read and never written.

samerun.web.explorer.places   what was named on the command line, and nothing outside it
samerun.web.explorer.guard    who may ask: this machine, under the right name, with the token, with GET
samerun.web.explorer.library  opened checkpoints and what inspecting them found
samerun.web.explorer.table    tensors searched, sorted, paged; as a tree; by size
samerun.web.explorer.picture  the pieces of a tensor as rectangles, with gaps and overlaps
samerun.web.explorer.spread   histogram and moments of a tensor, streamed
samerun.web.explorer.live     a run directory while it is being written
samerun.web.explorer.stream   long work as a stream of events that ends when nobody listens any more
samerun.web.explorer.answers  all of these as answers
samerun.web.explorer.app      their addresses
samerun.web.explorer.server   the server
"""
