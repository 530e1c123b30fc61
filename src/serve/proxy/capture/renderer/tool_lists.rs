//! Tool lists that are remembered, so that they are read once: all sessions of an agent send the same few.
//!
//! Neither many lists nor long ones fill the memory.

use super::{super::Form, Item};
use crate::model::chat_template::Tools;
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lists that are remembered.
const TOOL_LISTS: usize = 32;
/// Source bytes of all remembered lists; as values they take up to forty times as much.
const TOOL_LISTS_BYTES: usize = 8 << 20;
/// A longer list is not remembered.
const TOOL_LIST_BYTES: usize = 1 << 20;

/// A tool list, read.
#[derive(Debug)]
pub struct ToolList {
    /// In OpenAI form.
    pub list: Vec<Value>,
    /// As the template takes it, with special tokens shielded.
    pub(super) rendered: Tools,
}

struct Remembered {
    form: Form,
    raw: Box<[u8]>,
    list: Arc<ToolList>,
}

impl Remembered {
    fn is_of(&self, item: &Item<'_>) -> bool {
        self.form == item.form && *self.raw == *item.raw
    }
}

/// The remembered lists; the one that was used last is the first.
#[derive(Default)]
pub(super) struct ToolLists(Mutex<Vec<Remembered>>);

impl ToolLists {
    fn lock(&self) -> MutexGuard<'_, Vec<Remembered>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The list that these bytes are.
    pub(super) fn find(&self, item: Item<'_>) -> Option<Arc<ToolList>> {
        let mut lists = self.lock();
        let at = lists.iter().position(|known| known.is_of(&item))?;
        lists[..=at].rotate_right(1);
        Some(lists[0].list.clone())
    }

    /// Adds a list, unless it is too long; those that were used longest ago go.
    pub(super) fn remember(&self, item: Item<'_>, list: Arc<ToolList>) {
        if item.raw.len() > TOOL_LIST_BYTES {
            return;
        }
        let mut lists = self.lock();
        if lists.iter().any(|known| known.is_of(&item)) {
            return;
        }
        let remembered = Remembered {
            form: item.form,
            raw: item.raw.into(),
            list,
        };
        lists.insert(0, remembered);
        lists.truncate(TOOL_LISTS);
        let mut bytes = 0;
        let fit = lists.iter().take_while(|list| {
            bytes += list.raw.len();
            bytes <= TOOL_LISTS_BYTES
        });
        let fit = fit.count();
        lists.truncate(fit);
    }

    /// Number and source bytes.
    #[cfg(test)]
    pub(super) fn usage(&self) -> (usize, usize) {
        let lists = self.lock();
        (lists.len(), lists.iter().map(|list| list.raw.len()).sum())
    }
}
