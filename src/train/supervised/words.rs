//! The demo's word pool: every name, folder and value of a demo task is one of these words, so that
//! tasks that were never seen are new combinations of words that were.

use rand::{seq::SliceRandom, Rng};

/// The pool. No word contains another one, so that a search for a word finds that word alone.
pub const WORDS: [&str; 64] = [
    "amber", "apple", "arrow", "basil", "beach", "berry", "birch", "bread", "brick", "brook", "cedar",
    "chalk", "cloud", "clover", "coral", "daisy", "delta", "eagle", "ember", "fern", "field", "flint",
    "frost", "grape", "grass", "harbor", "hazel", "honey", "island", "ivory", "jade", "kettle", "lemon",
    "lilac", "linen", "maple", "marble", "meadow", "melon", "moon", "olive", "onyx", "opal", "orchid",
    "otter", "pearl", "pebble", "poppy", "quartz", "raven", "river", "robin", "sage", "shell", "silver",
    "spruce", "sugar", "thistle", "tiger", "tulip", "velvet", "violet", "walnut", "willow",
];

/// The keys of settings files.
pub const KEYS: [&str; 4] = ["color", "name", "place", "size"];

/// `n` different words in random order; `n` is at most the size of the pool.
pub fn draw_words<R: Rng>(rng: &mut R, n: usize) -> Vec<&'static str> {
    let mut words = WORDS;
    let (drawn, _) = words.partial_shuffle(rng, n);
    drawn.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_word_contains_another() {
        let all: Vec<&str> = WORDS.iter().chain(KEYS.iter()).copied().collect();
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                assert!(i == j || !a.contains(b), "{a} contains {b}");
            }
        }
    }
}
