//! Rows of routing along the tree: what a turn has to ask for, and the rows of a whole path.

use super::{NodeId, Tree};
use crate::{
    base::{RoutingRun, RoutingStore, SequenceRouting},
    serve::proxy::routing::{RoutingFile, TurnRows},
};
use std::sync::Arc;

impl Tree {
    /// Records routing from now on, in this file.
    pub fn record_routing(&mut self, file: Arc<RoutingFile>) {
        self.routing = Some(file);
    }

    /// The file, if routing is recorded.
    pub fn routing_file(&self) -> Option<Arc<RoutingFile>> {
        self.routing.clone()
    }

    /// The first token of a turn's prompt whose experts are not known: the turn has to ask for them. `None`
    /// when routing is not recorded.
    pub fn routing_from(&self, node: NodeId) -> Option<u32> {
        self.routing.as_ref()?;
        let above = self.path(node).into_iter().filter(|id| *id != node);
        let rows = above.filter_map(|id| self.nodes[id].rows);
        // A gap in the rows of earlier turns (a reply that was cut off) is closed by this one.
        Some(rows.fold(0, |end, rows| {
            if rows.first <= end {
                end.max(rows.first + rows.tokens)
            } else {
                end
            }
        }))
    }

    /// The rows of a turn whose reply is complete.
    pub fn set_rows(&mut self, node: NodeId, rows: TurnRows) {
        self.nodes[node].rows = Some(rows);
    }

    /// The rows of a turn's path.
    pub(super) fn routing_of(&self, leaf: NodeId) -> Option<SequenceRouting> {
        let file = self.routing.as_ref()?;
        let (shape, mut end) = (file.shape(), 0);
        let mut runs = Vec::new();
        for rows in self.path(leaf).into_iter().filter_map(|id| self.nodes[id].rows) {
            let skip = end.max(rows.first) - rows.first;
            let tokens = rows.tokens.saturating_sub(skip);
            if tokens > 0 {
                runs.push(RoutingRun {
                    first: rows.first + skip,
                    tokens,
                    store: file.clone() as Arc<dyn RoutingStore>,
                    at: rows.at + u64::from(skip) * shape.row_bytes() as u64,
                });
                end = rows.first + rows.tokens;
            }
        }
        Some(SequenceRouting { shape, runs })
    }
}
