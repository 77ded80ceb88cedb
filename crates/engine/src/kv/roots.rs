//! The roots of the prefix index: one for each cache salt, so that tenants with different salts share nothing.
//!
//! A root exists while a sequence or a cached block is below it. Salts are compared, never only their hashes.

use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_base::BlockId;

/// The index of a root. It is used again once the root is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RootId(u32);

/// The root of one salt.
pub(super) struct Root {
    /// Its number, unique among all contents ever.
    content: u64,
    salt: Option<Arc<str>>,
    /// Sequences that have entered and not left.
    num_sequences: u32,
    /// The block below it that was registered last.
    first_child: Option<BlockId>,
}

impl Root {
    /// Its number among all contents.
    pub(super) fn content(&self) -> u64 {
        self.content
    }

    /// Its salt.
    pub(super) fn salt(&self) -> &Option<Arc<str>> {
        &self.salt
    }

    /// The block below it that was registered last.
    pub(super) fn first_child(&self) -> Option<BlockId> {
        self.first_child
    }

    pub(super) fn first_child_mut(&mut self) -> &mut Option<BlockId> {
        &mut self.first_child
    }
}

/// All roots.
pub(super) struct Roots {
    roots: Vec<Option<Root>>,
    free: Vec<RootId>,
    // Ordered: a hash map would have to be keyed, because clients choose the salts.
    by_salt: BTreeMap<Option<Arc<str>>, RootId>,
}

impl Roots {
    pub(super) fn new() -> Self {
        Self {
            roots: Vec::new(),
            free: Vec::new(),
            by_salt: BTreeMap::new(),
        }
    }

    /// The root of `salt`, if there is something below it.
    pub(super) fn find(&self, salt: &Option<Arc<str>>) -> Option<RootId> {
        self.by_salt.get(salt).copied()
    }

    /// A sequence enters below the root of `salt`, which is created with the number `content` if it does not exist.
    pub(super) fn enter(
        &mut self,
        salt: &Option<Arc<str>>,
        content: impl FnOnce() -> u64,
    ) -> RootId {
        let id = self.find(salt).unwrap_or_else(|| {
            let root = Some(Root {
                content: content(),
                salt: salt.clone(),
                num_sequences: 0,
                first_child: None,
            });
            let id = match self.free.pop() {
                Some(id) => {
                    self.roots[id.0 as usize] = root;
                    id
                }
                None => {
                    self.roots.push(root);
                    // Roots are removed while sequences generate, when nothing may be allocated.
                    self.free.reserve(self.roots.len());
                    RootId(self.roots.len() as u32 - 1)
                }
            };
            self.by_salt.insert(salt.clone(), id);
            id
        });
        self[id].num_sequences += 1;
        id
    }

    /// A sequence leaves.
    pub(super) fn leave(&mut self, id: RootId) {
        self[id].num_sequences -= 1;
        self.remove_if_unused(id);
    }

    /// Removes a root if nothing is below it.
    pub(super) fn remove_if_unused(&mut self, id: RootId) {
        let root = &mut self.roots[id.0 as usize];
        let is_unused = |root: &mut Root| root.num_sequences == 0 && root.first_child.is_none();
        if let Some(root) = root.take_if(is_unused) {
            self.by_salt.remove(&root.salt);
            self.free.push(id);
        }
    }

    /// The root at `id`, if it exists.
    pub(super) fn get(&self, id: RootId) -> Option<&Root> {
        self.roots[id.0 as usize].as_ref()
    }

    /// Panics unless each root has a block below it, or as many sequences as it says.
    pub(super) fn check_integrity(&self, entered: &[RootId]) {
        let num_roots = self.roots.iter().flatten().count();
        assert_eq!(num_roots, self.by_salt.len(), "every root can be found");
        for (salt, &id) in &self.by_salt {
            let root = &self[id];
            assert_eq!(root.salt, *salt, "the salt of {id:?}");
            let num_sequences = entered.iter().filter(|&&entered| entered == id).count();
            assert_eq!(root.num_sequences as usize, num_sequences, "below {id:?}");
            assert!(
                num_sequences > 0 || root.first_child.is_some(),
                "nothing is below {id:?}"
            );
        }
    }
}

impl std::ops::Index<RootId> for Roots {
    type Output = Root;

    fn index(&self, id: RootId) -> &Root {
        self.get(id).expect("a root in use")
    }
}

impl std::ops::IndexMut<RootId> for Roots {
    fn index_mut(&mut self, id: RootId) -> &mut Root {
        self.roots[id.0 as usize].as_mut().expect("a root in use")
    }
}
