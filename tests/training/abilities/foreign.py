"""Messages in other languages than English. The model says that it only knows English."""

from __future__ import annotations

from random import Random

from tests.training.conversation import Phrasings
from tests.training.words import DataSplit

# By language: messages separated by `|`; the last two are held out.
_MESSAGES = {
    "German": """Hallo, wie geht es dir?|Schreib mir ein Gedicht über das Meer.
|Was ist die Hauptstadt von Frankreich?|Kannst du mir bei den Hausaufgaben helfen?
|Erkläre mir die Quantenphysik.|Guten Morgen! Wer bist du?|Wie spät ist es?
|Ich brauche ein Rezept für Apfelkuchen.
|Schreibe ein Programm in Python, das zwei Zahlen addiert.|Danke schön|Was kannst du?
|Übersetze das bitte ins Englische.|Wie wird das Wetter morgen?|Erzähl mir einen Witz
|Warum ist der Himmel blau?""",
    "French": """Bonjour, comment ça va?|Écris-moi un poème sur la mer.
|Quelle est la capitale de l'Espagne?|Peux-tu m'aider avec mes devoirs?
|Explique-moi la physique quantique.|Qui es-tu?|Quelle heure est-il?
|Donne-moi une recette de crêpes.|Écris une fonction Python qui trie une liste.
|Merci beaucoup|Je voudrais apprendre le piano.|Salut, tu parles français?
|Raconte-moi une histoire drôle.|Pourquoi le ciel est-il bleu?
|Quel temps fait-il à Paris?""",
    "Spanish": """Hola, ¿cómo estás?|Escribe un poema sobre el mar.|¿Cuál es la capital de Italia?
|¿Puedes ayudarme con mi tarea?|Explícame la física cuántica.|¿Quién eres?|¿Qué hora es?
|Dame una receta de tortilla.|Escribe una función en Python que sume dos números.
|Muchas gracias|Buenos días, necesito ayuda.|¿Qué puedes hacer?|Cuéntame un chiste.
|¿Por qué el cielo es azul?|¿Qué tiempo hace hoy en Madrid?""",
    "Italian": """Ciao, come stai?|Scrivi una poesia sul mare.|Qual è la capitale della Germania?
|Puoi aiutarmi con i compiti?|Spiegami la fisica quantistica.|Chi sei?|Che ore sono?
|Dammi una ricetta per la pasta.|Scrivi una funzione in Python che ordina una lista.
|Grazie mille|Buongiorno, cosa sai fare?|Parli italiano?|Raccontami una barzelletta.
|Perché il cielo è blu?""",
    "Portuguese": """Olá, como vai você?|Escreva um poema sobre o mar.|Qual é a capital da França?
|Você pode me ajudar com a lição de casa?|Explique a física quântica.|Quem é você?
|Que horas são?|Me dê uma receita de bolo.
|Escreva uma função em Python que some dois números.|Muito obrigado|Bom dia, tudo bem?
|O que você sabe fazer?|Conte uma piada.|Por que o céu é azul?""",
    "Dutch": """Hallo, hoe gaat het met je?|Schrijf een gedicht over de zee.
|Wat is de hoofdstad van België?|Kun je me helpen met mijn huiswerk?
|Leg kwantumfysica uit.|Wie ben jij?|Hoe laat is het?|Geef me een recept voor soep.
|Schrijf een programma in Python.|Dank je wel|Goedemorgen, wat kun je doen?
|Spreek je Nederlands?|Vertel een grap.|Waarom is de lucht blauw?""",
    "Swedish": """Hej, hur mår du?|Skriv en dikt om havet.|Vad är huvudstaden i Frankrike?
|Kan du hjälpa mig med läxan?|Förklara kvantfysik.|Vem är du?|Vad är klockan?
|Ge mig ett recept på pannkakor.|Tack så mycket|God morgon, vad kan du göra?
|Berätta en rolig historia.|Varför är himlen blå?""",
    "Danish": """Hej, hvordan har du det?|Skriv et digt om havet.|Hvad er hovedstaden i Tyskland?
|Kan du hjælpe mig med lektierne?|Hvem er du?|Hvad er klokken?|Mange tak
|Fortæl mig om rummet.|Kan du tale dansk?|Fortæl en vittighed.|Hvorfor er himlen blå?""",
    "Norwegian": """Hei, hvordan går det?|Skriv et dikt om havet.|Hva er hovedstaden i Italia?
|Kan du hjelpe meg med leksene?|Hvem er du?|Hva er klokka?|Tusen takk
|Forklar meg kvantefysikk.|Fortell en vits.|Hvorfor er himmelen blå?""",
    "Finnish": """Hei, mitä kuuluu?|Kirjoita runo merestä.|Mikä on Ranskan pääkaupunki?
|Voitko auttaa minua läksyissä?|Kuka sinä olet?|Paljonko kello on?|Kiitos paljon
|Selitä kvanttifysiikka.|Kerro vitsi.|Miksi taivas on sininen?""",
    "Polish": """Cześć, jak się masz?|Napisz wiersz o morzu.|Jaka jest stolica Francji?
|Czy możesz mi pomóc w zadaniu domowym?|Kim jesteś?|Która jest godzina?|Dziękuję bardzo
|Wyjaśnij fizykę kwantową.|Dzień dobry, co umiesz?|Opowiedz dowcip.
|Dlaczego niebo jest niebieskie?""",
    "Czech": """Ahoj, jak se máš?|Napiš báseň o moři.|Jaké je hlavní město Francie?
|Můžeš mi pomoct s úkolem?|Kdo jsi?|Kolik je hodin?|Děkuji moc
|Vysvětli kvantovou fyziku.|Řekni vtip.|Proč je nebe modré?""",
    "Slovak": """Ahoj, ako sa máš?|Napíš báseň o mori.|Aké je hlavné mesto Talianska?
|Môžeš mi pomôcť s úlohou?|Kto si?|Koľko je hodín?|Povedz vtip.|Prečo je obloha modrá?""",
    "Hungarian": """Szia, hogy vagy?|Írj egy verset a tengerről.|Mi Franciaország fővárosa?
|Segítenél a házi feladatban?|Ki vagy te?|Hány óra van?|Köszönöm szépen
|Magyarázd el a kvantumfizikát.|Mesélj egy viccet.|Miért kék az ég?""",
    "Romanian": """Bună, ce mai faci?|Scrie o poezie despre mare.|Care este capitala Franței?
|Mă poți ajuta cu tema?|Cine ești tu?|Cât este ceasul?|Mulțumesc mult
|Explică fizica cuantică.|Spune o glumă.|De ce este cerul albastru?""",
    "Turkish": """Merhaba, nasılsın?|Deniz hakkında bir şiir yaz.|Fransa'nın başkenti neresi?
|Ödevimde bana yardım eder misin?|Sen kimsin?|Saat kaç?|Çok teşekkürler
|Kuantum fiziğini açıkla.|Bugün hava nasıl?|Bir fıkra anlat.|Gökyüzü neden mavi?""",
    "Croatian": """Bok, kako si?|Napiši pjesmu o moru.|Koji je glavni grad Francuske?
|Možeš li mi pomoći sa zadaćom?|Tko si ti?|Koliko je sati?|Hvala lijepa|Ispričaj vic.
|Zašto je nebo plavo?""",
    "Indonesian": """Halo, apa kabar?|Tulis puisi tentang laut.|Apa ibu kota Jepang?
|Bisakah kamu membantu saya?|Siapa kamu?|Jam berapa sekarang?|Terima kasih banyak
|Jelaskan fisika kuantum.|Selamat pagi|Ceritakan lelucon.|Mengapa langit biru?""",
    "Tagalog": """Kumusta ka?|Sumulat ng tula tungkol sa dagat.|Ano ang kabisera ng Pransiya?
|Puwede mo ba akong tulungan?|Sino ka?|Anong oras na?|Maraming salamat
|Magkuwento ka ng biro.|Bakit asul ang langit?""",
    "Vietnamese": """Xin chào, bạn có khỏe không?|Viết một bài thơ về biển.|Thủ đô của Pháp là gì?
|Bạn có thể giúp tôi không?|Bạn là ai?|Mấy giờ rồi?|Cảm ơn nhiều
|Giải thích vật lý lượng tử.|Kể một câu chuyện cười.|Tại sao bầu trời màu xanh?""",
    "Swahili": """Habari, hujambo?|Andika shairi kuhusu bahari.|Mji mkuu wa Ufaransa ni upi?
|Unaweza kunisaidia?|Wewe ni nani?|Ni saa ngapi?|Asante sana|Niambie utani.
|Kwa nini anga ni bluu?""",
    "Latin": """Salve, quid agis?|Scribe carmen de mari.|Quis es tu?|Quota hora est?|Gratias tibi ago
|Veni, vidi, vici.|Narra mihi fabulam.|Cur caelum caeruleum est?""",
    "Catalan": """Hola, com estàs?|Escriu un poema sobre el mar.|Quina és la capital de França?
|Em pots ajudar amb els deures?|Qui ets?|Quina hora és?|Moltes gràcies
|Explica un acudit.|Per què el cel és blau?""",
    "Irish": """Dia duit, conas atá tú?|Scríobh dán faoin bhfarraige.|Cé tusa?|Cén t-am é?
|Go raibh maith agat|Inis scéal grinn dom.|Cén fáth a bhfuil an spéir gorm?""",
    "Lithuanian": """Labas, kaip sekasi?|Parašyk eilėraštį apie jūrą.|Kas yra Prancūzijos sostinė?
|Ar gali man padėti?|Kas tu esi?|Kiek valandų?|Labai ačiū|Papasakok anekdotą.
|Kodėl dangus mėlynas?""",
    "Russian": """Привет, как дела?|Напиши стихотворение о море.|Какая столица Франции?
|Можешь помочь мне с домашним заданием?|Кто ты?|Который час?|Большое спасибо
|Объясни квантовую физику.|Напиши функцию на Python, которая складывает два числа.
|Переведи на английский: я люблю тебя|Расскажи анекдот.|Почему небо голубое?""",
    "Ukrainian": """Привіт, як справи?|Напиши вірш про море.|Яка столиця Франції?
|Допоможи мені з домашнім завданням.|Хто ти?|Котра година?|Дуже дякую|Розкажи анекдот.
|Чому небо блакитне?""",
    "Bulgarian": """Здравей, как си?|Напиши стихотворение за морето.|Коя е столицата на Франция?
|Можеш ли да ми помогнеш?|Кой си ти?|Колко е часът?|Разкажи виц.|Защо небето е синьо?""",
    "Serbian": """Здраво, како си?|Напиши песму о мору.|Који је главни град Француске?
|Можеш ли да ми помогнеш?|Ко си ти?|Колико је сати?|Испричај виц.|Зашто је небо плаво?""",
    "Greek": """Γεια σου, τι κάνεις;|Γράψε ένα ποίημα για τη θάλασσα.
|Ποια είναι η πρωτεύουσα της Γαλλίας;|Μπορείς να με βοηθήσεις;|Ποιος είσαι;
|Τι ώρα είναι;|Ευχαριστώ πολύ|Πες μου ένα ανέκδοτο.|Γιατί ο ουρανός είναι μπλε;""",
    "Arabic": """مرحبا، كيف حالك؟|اكتب قصيدة عن البحر.|ما هي عاصمة فرنسا؟|هل يمكنك مساعدتي في واجبي؟
|من أنت؟|كم الساعة؟|شكرا جزيلا|اشرح فيزياء الكم.|احك لي نكتة.|لماذا السماء زرقاء؟""",
    "Hebrew": """שלום, מה שלומך?|כתוב שיר על הים.|מהי בירת צרפת?|אתה יכול לעזור לי?|מי אתה?|מה השעה?
|תודה רבה|ספר לי בדיחה.|למה השמיים כחולים?""",
    "Persian": """سلام، حال شما چطور است؟|شعری درباره دریا بنویس.|پایتخت فرانسه کجاست؟
|می‌توانی به من کمک کنی؟|تو کی هستی؟|ساعت چند است؟|خیلی ممنون|یک لطیفه بگو.
|چرا آسمان آبی است؟""",
    "Urdu": """ہیلو، آپ کیسے ہیں؟|سمندر کے بارے میں ایک نظم لکھو۔|فرانس کا دارالحکومت کیا ہے؟
|آپ کون ہیں؟|کیا وقت ہوا ہے؟|مجھے ایک لطیفہ سناؤ۔|آسمان نیلا کیوں ہے؟""",
    "Hindi": """नमस्ते, आप कैसे हैं?|समुद्र पर एक कविता लिखो।|फ्रांस की राजधानी क्या है?
|क्या आप मेरी मदद कर सकते हैं?|तुम कौन हो?|कितने बजे हैं?|बहुत धन्यवाद
|मुझे एक चुटकुला सुनाओ।|आसमान नीला क्यों है?""",
    "Bengali": """হ্যালো, কেমন আছো?|সমুদ্র নিয়ে একটি কবিতা লেখো।|ফ্রান্সের রাজধানী কী?|তুমি কে?
|এখন কয়টা বাজে?|একটা কৌতুক বলো।|আকাশ নীল কেন?""",
    "Tamil": """வணக்கம், எப்படி இருக்கிறீர்கள்?|கடலைப் பற்றி ஒரு கவிதை எழுது.|நீ யார்?|மணி என்ன?
|மிக்க நன்றி|ஒரு நகைச்சுவை சொல்.|வானம் ஏன் நீலமாக இருக்கிறது?""",
    "Thai": """สวัสดี สบายดีไหม|เขียนกลอนเกี่ยวกับทะเล|เมืองหลวงของฝรั่งเศสคืออะไร|คุณช่วยฉันได้ไหม
|คุณเป็นใคร|กี่โมงแล้ว|ขอบคุณมาก|เล่าเรื่องตลกให้ฟังหน่อย|ทำไมท้องฟ้าถึงเป็นสีฟ้า""",
    "Chinese": """你好，你怎么样？|写一首关于大海的诗。|法国的首都是哪里？|你能帮我做作业吗？|你是谁？|现在几点了？|非常感谢|解释一下量子物理。|用Python写一个排序函数。
|请把这句话翻译成英语。|讲个笑话。|天空为什么是蓝色的？""",
    "Traditional Chinese": """你會說中文嗎？|請幫我寫一封信。|臺灣的首都在哪裡？|早安|謝謝你的幫忙|明天會下雨嗎？|推薦一本書給我。""",
    "Japanese": """こんにちは、元気ですか？|海についての詩を書いてください。|フランスの首都はどこですか？|宿題を手伝ってくれますか？|あなたは誰ですか？|今何時ですか？|ありがとうございます
|量子物理学を説明してください。|Pythonで関数を書いて。|冗談を言ってください。|空はなぜ青いのですか？""",
    "Korean": """안녕하세요, 어떻게 지내세요?|바다에 대한 시를 써 주세요.|프랑스의 수도는 어디인가요?|숙제를 도와줄 수 있나요?|당신은 누구세요?|지금 몇 시예요?
|감사합니다|양자 물리학을 설명해 주세요.|농담 하나 해 주세요.|하늘은 왜 파란가요?""",
    "Esperanto": """Saluton, kiel vi fartas?|Skribu poemon pri la maro.|Kio estas la ĉefurbo de Francio?
|Kiu vi estas?|Kioma horo estas?|Rakontu ŝercon.|Kial la ĉielo estas blua?""",
}
LANGUAGES = tuple(_MESSAGES)
_GREETED = ("Hi! ", "Hello, ", "ok. ", "Please: ")
_FEWEST_WORDS = 4  # of a message to take a part of


def _of(messages: str) -> Phrasings:
    *train, first, second = messages.replace("\n", "").split("|")
    return Phrasings(tuple(train), (first, second))


_BY_LANGUAGE = {language: _of(messages) for language, messages in _MESSAGES.items()}


def message(rng: Random, split: DataSplit) -> str:
    """One message; in training often a part of it, or two after each other."""
    phrasings = _BY_LANGUAGE[rng.choice(LANGUAGES)]
    text = phrasings.pick(rng, split)
    if split is DataSplit.HELD_OUT:
        return text
    kind = rng.random()
    if kind < 0.25:
        return _part(rng, text)
    if kind < 0.4:
        return f"{text} {_part(rng, phrasings.pick(rng, split))}"
    if kind < 0.5:
        return rng.choice(_GREETED) + text
    return text


def _part(rng: Random, text: str) -> str:
    """Some words in a row; of scripts without spaces, some letters."""
    pieces, joint = (text.split(), " ") if " " in text else (list(text), "")
    if len(pieces) < _FEWEST_WORDS:
        return text
    length = rng.randint(len(pieces) // 2 + 1, len(pieces))
    first = rng.randint(0, len(pieces) - length)
    return joint.join(pieces[first : first + length])
