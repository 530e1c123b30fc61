//! Words and their ids, as long as they fit.

use super::merge::NumberHasher;
use std::{collections::HashMap, hash::BuildHasherDefault};

/// Words that are remembered; then the cache starts anew.
const MAX_WORDS: usize = 1 << 15;

/// See the module documentation.
#[derive(Default)]
pub struct WordCache {
    /// Place and number of the ids of a word.
    words: HashMap<Box<[u8]>, (u32, u32), BuildHasherDefault<NumberHasher>>,
    ids: Vec<u32>,
}

impl WordCache {
    /// Appends the ids of a word; false if it is not known.
    #[inline]
    pub fn get(&self, word: &[u8], ids: &mut Vec<u32>) -> bool {
        match self.words.get(word) {
            Some((at, count)) => {
                ids.extend_from_slice(&self.ids[*at as usize..(*at + *count) as usize]);
                true
            }
            None => false,
        }
    }

    /// Remembers a word.
    pub fn put(&mut self, word: &[u8], ids: &[u32]) {
        if self.words.len() >= MAX_WORDS {
            self.words.clear();
            self.ids.clear();
        }
        self.words
            .insert(word.into(), (self.ids.len() as u32, ids.len() as u32));
        self.ids.extend_from_slice(ids);
    }
}
