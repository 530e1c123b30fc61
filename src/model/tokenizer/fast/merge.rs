//! Byte-pair merges: the pair of lowest rank is merged first, the leftmost of equal ones.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    hash::{BuildHasherDefault, Hasher},
};

/// Words up to this length are merged by scanning for the lowest rank; longer ones with a heap.
const SCAN_BYTES: usize = 96;

/// A hash for keys that are numbers: multiply and fold.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, number: u64) {
        const GOLDEN: u128 = 0x9e37_79b9_7f4a_7c15;
        let product = u128::from(self.0.rotate_left(23) ^ number) * GOLDEN;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

type Ranks = HashMap<u64, (u32, u32), BuildHasherDefault<NumberHasher>>;

/// The merges of a vocabulary.
pub struct Merges {
    byte_ids: [u32; 256],
    /// Rank and result by pair.
    ranks: Ranks,
    /// Words that are tokens whatever the merges say.
    whole: HashMap<Box<[u8]>, u32>,
}

impl Merges {
    /// `pairs` in order of rank: left, right and merged token.
    pub fn new(byte_ids: [u32; 256], pairs: &[(u32, u32, u32)], whole: HashMap<Box<[u8]>, u32>) -> Self {
        let mut ranks = Ranks::with_capacity_and_hasher(pairs.len(), BuildHasherDefault::default());
        for (rank, (left, right, merged)) in pairs.iter().enumerate() {
            // As in the library, a repeated pair has its last rank.
            ranks.insert(key(*left, *right), (rank as u32, *merged));
        }
        Self {
            byte_ids,
            ranks,
            whole,
        }
    }

    /// Appends the ids of one word.
    pub fn encode(&self, word: &[u8], ids: &mut Vec<u32>) {
        if !self.whole.is_empty() {
            if let Some(id) = self.whole.get(word) {
                ids.push(*id);
                return;
            }
        }
        if word.len() <= SCAN_BYTES {
            self.scan(word, ids);
        } else {
            self.heap(word, ids);
        }
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        self.ranks
            .get(&key(left, right))
            .map_or(u32::MAX, |(rank, _)| *rank)
    }

    fn scan(&self, word: &[u8], ids: &mut Vec<u32>) {
        let (mut symbols, mut ranks) = ([0u32; SCAN_BYTES], [u32::MAX; SCAN_BYTES]);
        let mut length = word.len();
        for (symbol, byte) in symbols.iter_mut().zip(word) {
            *symbol = self.byte_ids[usize::from(*byte)];
        }
        for i in 1..length {
            ranks[i - 1] = self.rank(symbols[i - 1], symbols[i]);
        }
        while length > 1 {
            let (mut at, mut lowest) = (0, u32::MAX);
            for (i, rank) in ranks[..length - 1].iter().enumerate() {
                if *rank < lowest {
                    (at, lowest) = (i, *rank);
                }
            }
            if lowest == u32::MAX {
                break;
            }
            symbols[at] = self.ranks[&key(symbols[at], symbols[at + 1])].1;
            symbols.copy_within(at + 2..length, at + 1);
            ranks.copy_within(at + 1..length - 1, at);
            length -= 1;
            if at > 0 {
                ranks[at - 1] = self.rank(symbols[at - 1], symbols[at]);
            }
            if at + 1 < length {
                ranks[at] = self.rank(symbols[at], symbols[at + 1]);
            }
        }
        ids.extend_from_slice(&symbols[..length]);
    }

    /// Symbols as a linked list; an entry of the heap is stale if its pair is not there any more.
    fn heap(&self, word: &[u8], ids: &mut Vec<u32>) {
        const NONE: usize = usize::MAX;
        let count = word.len();
        let mut symbols: Vec<u32> = word.iter().map(|b| self.byte_ids[usize::from(*b)]).collect();
        let mut next: Vec<usize> = (1..=count).map(|i| if i < count { i } else { NONE }).collect();
        let mut before: Vec<usize> = (0..count).map(|i| i.checked_sub(1).unwrap_or(NONE)).collect();
        let mut alive = vec![true; count];
        let mut queue = BinaryHeap::new();
        let push = |queue: &mut BinaryHeap<_>, symbols: &[u32], left: usize, right: usize| {
            if let Some((rank, merged)) = self.ranks.get(&key(symbols[left], symbols[right])) {
                queue.push(Reverse((
                    *rank,
                    left,
                    right,
                    symbols[left],
                    symbols[right],
                    *merged,
                )));
            }
        };
        for i in 1..count {
            push(&mut queue, &symbols, i - 1, i);
        }
        while let Some(Reverse((_, left, right, a, b, merged))) = queue.pop() {
            let there = alive[left] && alive[right] && next[left] == right;
            if !there || symbols[left] != a || symbols[right] != b {
                continue;
            }
            symbols[left] = merged;
            alive[right] = false;
            next[left] = next[right];
            if next[left] != NONE {
                before[next[left]] = left;
                push(&mut queue, &symbols, left, next[left]);
            }
            if before[left] != NONE {
                push(&mut queue, &symbols, before[left], left);
            }
        }
        ids.extend(
            symbols
                .iter()
                .zip(&alive)
                .filter(|(_, alive)| **alive)
                .map(|(s, _)| *s),
        );
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}
